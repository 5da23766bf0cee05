"""Free text: calibration of tokens, and how well uncertainty detects wrong answers."""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import transformers
from peft import TaskType
from torch.utils.data import DataLoader

import laplace_lora_ext
from benchmarks import training
from benchmarks.experiments import text_measures as measures
from benchmarks.fine_tuning import with_lora
from benchmarks.methods import free_text
from benchmarks.methods.free_text import Predictor, posterior
from benchmarks.models import device_of, gemma_folder, load_tokenizer
from benchmarks.options import Text
from benchmarks.report import Figures, Result, Row, over_seeds, say, table
from benchmarks.tasks.free_text import Written, by_length, collate, read
from laplace_lora_ext.models.tokens_model import TokensModel

LORA = ("q_proj", "v_proj")
FEW_TEXTS = 16  # training texts for methods that look at draws to choose
GRID: Any = {"log_prior_prec_min": 0, "log_prior_prec_max": 4}
METHOD = ["name", "chosen_by"]
QUALITY = ["prior_precision", "token_accuracy", "nll", "ece", "seconds_a_token"]
COSTS = ["wrong_answers", "predictive_seconds", "model_seconds", "changed_answers"]
COSTS += ["fit_ratio", "score_ratio", "training_seconds", "seconds"]


def run(options: Text) -> Iterator[Result]:
    """Measure each seed, and report after it, so that a run of hours may be cut off."""
    figures: Figures = {"methods": [], "detectors": [], "costs": []}
    for seed in options.seeds:
        for name, rows in measure(options, seed, device_of(options.device)).items():
            figures[name] += [{"seed": seed, **row} for row in rows]
        yield figures, text_of(figures, options)


def measure(options: Text, seed: int, device: str) -> dict[str, list[Row]]:
    """Fine-tune, fit, and measure every method."""
    started = time.perf_counter()
    train, validation, test = read(options, seed)
    # Processor time does not depend on what else the processor does.
    clock = time.process_time if device == "cpu" else time.perf_counter
    folder = options.model or gemma_folder(options.cache)
    tokenizer = load_tokenizer(folder)
    tokenizer.padding_side = "left"

    def batches(texts: list[Written]) -> list[Any]:
        return [collate(tokenizer, part) for part in by_length(texts, options.batch_size)]

    model = fine_tuned(options, seed, folder, train, tokenizer, device)
    trained = time.perf_counter() - started
    la: Any = laplace_lora_ext.Laplace(
        model,
        "language_modeling",
        subset_of_weights="lora",
        hessian_structure="lowrank_kron",
        backend_kwargs={"seed": seed},
    )
    torch.manual_seed(seed)
    la.fit(batches(train), progress_bar=not options.quiet)
    written, wrong = measures.write_answers(la, tokenizer, test, options.batch_size)
    of_test, answered, rows, detectors = batches(test), batches(written), [], []
    choosing = batches(train[:FEW_TEXTS]), batches(validation)
    for name, chosen_by, build in methods(la, options, seed, *choosing):
        say(options, f"{name}, {chosen_by} ({time.perf_counter() - started:.0f} s)")
        method, predictor, begun = {"name": name, "chosen_by": chosen_by}, build(), clock()
        row = {**method, **measures.quality(predictor, of_test)}
        row["seconds_a_token"] = (clock() - begun) / row["tokens"]
        chosen = la.prior_precision.mean().item() if predictor.is_posterior else None
        rows.append({**row, "prior_precision": chosen})
        detectors += [{**method, **x} for x in measures.detection(predictor, answered, wrong)]
    few = test[: options.written_examples]
    costs = {
        "wrong_answers": sum(wrong),
        **measures.speed(la, tokenizer, few, options.draws, clock),
        **measures.relative_cost(la, batches(train)[-1], options.draws, clock),
        "training_seconds": trained,
        "seconds": time.perf_counter() - started,
    }
    return {"methods": rows, "detectors": detectors, "costs": [costs]}


def text_of(figures: Figures, options: Text) -> list[str]:
    """All that has been measured so far, in words and tables."""
    seeds = ", ".join(str(row["seed"]) for row in figures["costs"])
    return [
        f"Task {options.task}, {options.train_examples} training and {options.test_examples} test "
        f"texts, {options.draws} draws. Seeds: {seeds}; mean ± standard deviation of several.",
        table(over_seeds(figures["methods"], METHOD, QUALITY)),
        "How well scores detect the wrong ones among the model's own greedy answers:",
        table(over_seeds(figures["detectors"], [*METHOD, "score"], ["auroc", "aurc"])),
        f"Wrong answers of {options.test_examples}; seconds to write a token under the predictive "
        f"and by the model itself; how many of {options.written_examples} answers that changes; a "
        "fit over forward and backward pass of the same texts, a score over its forward passes:",
        table(figures["costs"], ["seed", *COSTS]),
    ]


def fine_tuned(
    options: Text, seed: int, folder: Any, train: list[Written], tokenizer: Any, device: str
) -> torch.nn.Module:
    """The language model with LoRA, trained on the answers."""
    transformers.set_seed(seed)
    settings = training.Hyperparameters(
        *("gemma-3-270m", LORA, options.batch_size),
        maximum_length=0,
        rank=options.rank,
        alpha=2 * options.rank,
        dropout=0.0,
        learning_rate=options.learning_rate,
    ).for_epochs(options.epochs, len(train))
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = with_lora(base.to(device), settings, TaskType.CAUSAL_LM)
    loader = DataLoader(
        train,  # pyright: ignore[reportArgumentType]
        options.batch_size,
        shuffle=True,
        collate_fn=partial(collate, tokenizer),
        generator=torch.Generator().manual_seed(seed),
    )
    loss = partial(free_text.token_loss, TokensModel(model))
    key = [seed, repr(settings), repr(train)]
    how = (model, loader, loss, settings, not options.quiet)
    training.read_or_train(model, key, options.cache, lambda: training.train(*how))
    return model


def methods(
    la: Any, options: Text, seed: int, train: list[Any], validation: list[Any]
) -> Iterable[tuple[str, str, Callable[[], Predictor]]]:
    """Methods in turn; the prior precision is chosen before each posterior that uses it."""
    draws = options.draws
    yield "MAP", "", lambda: Predictor(la)
    yield "Temperature scaling", "validation", lambda: free_text.scaled(la, validation)
    yield "TFB", "training texts", lambda: free_text.training_free(la, draws, train)
    how: Any = {"n_samples": draws, "progress_bar": not options.quiet}
    la.optimize_prior_precision(method="marglik")
    yield "Posterior", "evidence", lambda: posterior(la, draws)
    how["generator"] = torch.Generator().manual_seed(seed)
    la.optimize_prior_precision(method="agreement", train_loader=train, **how)
    yield "Posterior", "agreement", lambda: posterior(la, draws)
    how["generator"].manual_seed(seed)
    grid = {**GRID, "grid_size": options.grid_size}
    la.optimize_prior_precision(method="gridsearch", val_loader=validation, **grid, **how)
    yield "Posterior", "validation", lambda: posterior(la, draws)
