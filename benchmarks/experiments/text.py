"""Free text: calibration of tokens, and how well uncertainty detects wrong answers."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import TaskType
from torch.utils.data import DataLoader

import laplace_lora_ext
from benchmarks import training
from benchmarks.experiments import text_measures as measures
from benchmarks.fine_tuning import with_lora
from benchmarks.measuring import processor_clock
from benchmarks.methods import free_text
from benchmarks.methods.free_text import Predictor, posterior
from benchmarks.models import device_of, gemma_folder, load_model, load_tokenizer
from benchmarks.options import Text
from benchmarks.report import Figures, Result, Row, over_seeds, say, table
from benchmarks.tasks.free_text import Written, by_length, collate, read
from laplace_lora_ext.tasks.language import TokensModel

LORA = ("q_proj", "v_proj")
FEW_TEXTS = 16  # training texts that choose the noise of TFB
LOWEST_PRECISION = 0  # of the prior, as a power of ten, for validation texts to choose
HIGHEST_PRECISION = 4
METHOD = ["name", "chosen_by"]
QUALITY = ["prior_precision", "token_accuracy", "nll", "ece", "seconds_a_token"]
DETECTION = ["auroc", "aurc"]
COSTS = [
    "wrong_answers",
    "fit_ratio",
    "score_ratio",
    "training_seconds",
    "seconds",
]


def run(options: Text) -> Iterator[Result]:
    """Measure each seed, and report after it, so that a run of hours may be cut off."""
    figures: Figures = {"methods": [], "detectors": [], "costs": []}
    for seed in options.seeds:
        of_seed = measure(options, seed, device_of(options.device))
        for name, rows in asdict(of_seed).items():
            figures[name] += [{"seed": seed, **row} for row in rows]
        yield figures, text_of(figures, options)


@dataclass(frozen=True)
class Measured:
    """Rows of one seed."""

    methods: list[Row]
    detectors: list[Row]
    costs: list[Row]


def measure(
    options: Text,
    seed: int,
    device: str,
) -> Measured:
    """Fine-tune, fit, and measure every method."""
    started = time.perf_counter()
    train, validation, test = read(options, seed)
    clock = processor_clock(device)
    folder = options.model or gemma_folder(options.cache)
    tokenizer = load_tokenizer(folder)
    # Answers are written behind their prompts, which must not be padded there.
    tokenizer.padding_side = "left"

    def batches(texts: list[Written]) -> list[Any]:
        parts = by_length(texts, options.batch_size)
        return [collate(tokenizer, part) for part in parts]

    model = fine_tuned(options, seed, folder, train, tokenizer, device)
    training_seconds = time.perf_counter() - started
    la = posterior_of(model, seed)
    # What comes is the same for a model that was trained and one that was read.
    torch.manual_seed(seed)
    la.fit(batches(train), progress_bar=not options.quiet)
    written, wrong = measures.write_answers(la, tokenizer, test, options.batch_size)
    batches_of_test = batches(test)
    batches_of_answers = batches(written)
    few_of_train = batches(train[:FEW_TEXTS])
    offered = contestants(la, options, seed, few_of_train, batches(validation))
    rows = []
    detectors = []
    for contestant in offered:
        elapsed = time.perf_counter() - started
        say(options, f"{contestant.name}, {contestant.chosen_by} ({elapsed:.0f} s)")
        method = {"name": contestant.name, "chosen_by": contestant.chosen_by}
        predictor = contestant.predictor
        begun = clock()
        quality = measures.quality(predictor, batches_of_test)
        seconds = clock() - begun
        prior_precision = None
        if predictor.is_posterior:
            prior_precision = la.prior_precision.mean().item()
        rows.append(
            {
                **method,
                **quality,
                "seconds_a_token": seconds / quality["tokens"],
                "prior_precision": prior_precision,
            }
        )
        for detector in measures.detection(predictor, batches_of_answers, wrong):
            detectors.append({**method, **detector})
    # Batches are ordered by length, and a longer one is timed more surely.
    *_, longest = batches(train)
    costs = {
        "wrong_answers": sum(wrong),
        **measures.relative_cost(la, longest, options.draws, clock),
        "training_seconds": training_seconds,
        "seconds": time.perf_counter() - started,
    }
    return Measured(rows, detectors, [costs])


def text_of(figures: Figures, options: Text) -> list[str]:
    """Put all that has been measured so far in words and tables."""
    seeds = ", ".join(str(row["seed"]) for row in figures["costs"])
    return [
        f"Task {options.task}, {options.train_examples} training and "
        f"{options.test_examples} test texts, {options.draws} draws. Seeds: {seeds}; "
        "mean ± standard deviation of several.",
        table(over_seeds(figures["methods"], METHOD, QUALITY)),
        "How well scores detect the wrong ones among the model's own greedy answers:",
        table(over_seeds(figures["detectors"], [*METHOD, "score"], DETECTION)),
        f"Wrong answers of {options.test_examples}; a fit over forward and backward "
        "pass of the same texts, a score over its forward passes:",
        table(figures["costs"], ["seed", *COSTS]),
    ]


def posterior_of(
    model: torch.nn.Module,
    seed: int,
) -> Any:
    """Make a language model's posterior; the seed decides its random labels."""
    return laplace_lora_ext.Laplace(
        model,
        "language_modeling",
        subset_of_weights="lora",
        hessian_structure="lowrank_kron",
        backend_kwargs={"seed": seed},
    )


def fine_tuned(
    options: Text,
    seed: int,
    folder: str | Path,
    train: list[Written],
    tokenizer: Any,
    device: str,
) -> torch.nn.Module:
    """Train the language model with LoRA on the answers."""
    transformers.set_seed(seed)
    settings = training.Hyperparameters(
        model="gemma-3-270m",
        target_modules=LORA,
        batch_size=options.batch_size,
        maximum_length=0,  # texts are short, and none is cut
        rank=options.rank,
        # As LoRA's settings have it elsewhere in the lab: 16 for a rank of 8.
        alpha=2 * options.rank,
        dropout=0.0,
        learning_rate=options.learning_rate,
    ).for_epochs(options.epochs, len(train))
    base = load_model(transformers.AutoModelForCausalLM, folder)
    model = with_lora(base.to(device), settings, TaskType.CAUSAL_LM)
    loader = DataLoader(
        training.as_dataset(train),
        options.batch_size,
        shuffle=True,
        collate_fn=partial(collate, tokenizer),
        generator=torch.Generator().manual_seed(seed),
    )

    def trained() -> training.Checkpoints:
        return training.train(
            model,
            loader,
            partial(free_text.token_loss, TokensModel(model)),
            settings,
            show_progress=not options.quiet,
            recipe=training.Recipe(),
        )

    key = [seed, repr(settings), repr(train)]
    training.read_or_train(model, key, options.cache, trained)
    return model


@dataclass(frozen=True)
class Contestant:
    """What predicts, and which texts have chosen its settings."""

    name: str
    chosen_by: str
    predictor: Predictor


def contestants(
    la: Any,
    options: Text,
    seed: int,
    train: list[Any],
    validation: list[Any],
) -> Iterator[Contestant]:
    """Yield contestants, each to be measured before the next prior is chosen."""
    draws = options.draws
    yield Contestant("MAP", "", Predictor(la))
    yield Contestant(
        "Temperature scaling", "validation", free_text.scaled(la, validation)
    )
    yield Contestant("TFB", "training texts", free_text.training_free(la, draws, train))
    la.optimize_prior_precision(method="marglik")
    yield Contestant("Posterior", "evidence", posterior(la, draws))
    la.optimize_prior_precision(
        method="gridsearch",
        val_loader=validation,
        log_prior_prec_min=LOWEST_PRECISION,
        log_prior_prec_max=HIGHEST_PRECISION,
        grid_size=options.grid_size,
        n_samples=draws,
        generator=torch.Generator().manual_seed(seed),
        progress_bar=not options.quiet,
    )
    yield Contestant("Posterior", "validation", posterior(la, draws))
