"""Free text: calibration of tokens, and how well uncertainty detects wrong answers."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import transformers
from peft import TaskType
from scipy.stats import mannwhitneyu
from torch.utils.data import DataLoader
from torchmetrics.functional.classification import binary_calibration_error

import laplace_lora_ext
from benchmarks.fine_tuning import with_lora
from benchmarks.gemma import gemma_folder
from benchmarks.methods.free_text import (
    Predictor,
    posterior,
    scaled,
    token_loss,
    training_free,
)
from benchmarks.models import device_of
from benchmarks.options import Text
from benchmarks.report import Figures, Row, hardware_of, provenance, table, write
from benchmarks.tasks.free_text import WritingTask, Written, read
from benchmarks.training import Hyperparameters, read_or_train, train
from laplace_lora_ext.metrics import N_BINS, risk_coverage
from laplace_lora_ext.models.tokens_model import TokensModel
from laplace_lora_ext.text.scores import score

LORA = ("q_proj", "v_proj")
IGNORED = -100  # label of a token that is no part of an answer
OF_THE_MODEL = ("log-probability", "summed entropy")  # scores that need no draws
LONGEST_ANSWER = 16  # tokens
FEW_TEXTS = 16  # training texts for methods that look at draws to choose
REPETITIONS = 3
Clock = Callable[[], float]
GRID: Any = {"log_prior_prec_min": 0, "log_prior_prec_max": 4}
QUALITY = ["name", "chosen_by", "token_accuracy", "nll", "ece", "seconds_a_token"]
DETECTION = ["name", "chosen_by", "score", "auroc", "aurc"]
TITLES = {
    **{"name": "Method", "chosen_by": "Chosen by", "nll": "Token NLL", "ece": "Token ECE"},
    **{"score": "Score of an answer", "auroc": "AUROC", "aurc": "Area under risk-coverage"},
    "seconds_a_token": "Seconds a token",
}


def run(options: Text) -> Figures:
    """Fine-tune, fit, measure every method; write figures and tables."""
    if options.threads:
        torch.set_num_threads(options.threads)
    started = time.perf_counter()
    task, device = read(options), device_of(options.device)
    # Processor time does not depend on what else the processor does.
    clock = time.process_time if device == "cpu" else time.perf_counter
    folder = options.model or gemma_folder(options.cache)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.pad_token or tokenizer.eos_token, "left"

    def batches(texts: list[Written]) -> list[Any]:
        return [collate(tokenizer, part) for part in by_length(texts, options.batch_size)]

    model = fine_tuned(options, folder, task, tokenizer, device)
    trained = time.perf_counter()
    la: Any = laplace_lora_ext.Laplace(
        model, "language_modeling", subset_of_weights="lora", hessian_structure="lowrank_kron"
    )
    torch.manual_seed(options.seed)
    begun = clock()
    la.fit(batches(task.train), progress_bar=not options.quiet)
    fitted = clock() - begun
    written, wrong = write_answers(la, tokenizer, task.test, options.batch_size)
    rows, detectors = [], []
    for name, chosen_by, build in methods(la, options, task, batches):
        if not options.quiet:
            print(f"{name}, {chosen_by} ({time.perf_counter() - started:.0f} s)", flush=True)
        predictor = build()
        begun = clock()
        row = {"name": name, "chosen_by": chosen_by, **quality(predictor, batches(task.test))}
        row["seconds_a_token"] = (clock() - begun) / row["tokens"]
        row["prior_precision"] = la.prior_precision.tolist()
        rows.append(row)
        found = detection(predictor, batches(written), wrong)
        detectors += [{"name": name, "chosen_by": chosen_by, **one} for one in found]
    spent = speed(la, tokenizer, task.test[: options.written_examples], options.draws, clock)
    cost = relative_cost(la, batches(task.train)[-1], options.draws, clock)
    figures: Figures = {
        **provenance(options, device),
        "methods": rows,
        "detectors": detectors,
        "answers": {"wrong": sum(wrong), "of": len(wrong)},
        "generation": spent,
        "cost": cost,
        "seconds": {
            "training": trained - started,
            "fit": fitted,
            "in_all": time.perf_counter() - started,
        },
    }
    tables = (
        table(figures["methods"], QUALITY, TITLES),
        table(figures["detectors"], DETECTION, TITLES),
    )
    write(options.output, "text", figures, summary(figures, options), *tables)
    return figures


def summary(figures: Figures, options: Text) -> str:
    """How the tables were measured, and what posteriors cost."""
    answers, seconds, spent = figures["answers"], figures["seconds"], figures["generation"]
    return (
        f"Task {options.task}, seed {options.seed}: {options.train_examples} training and "
        f"{options.test_examples} test texts, {options.draws} draws; {answers['wrong']} of "
        f"{answers['of']} written answers are wrong. {hardware_of(figures)}; "
        f"{seconds['in_all']:.0f} s in all, of which the fit took {seconds['fit']:.0f} s.\n"
        f"Written under the predictive: {spent['predictive']:.2f} s a token, by the model itself "
        f"{spent['model']:.2f} s; {spent['changed']} of {spent['of']} answers differ.\n"
        f"A fit takes {figures['cost']['fit']:.2f} times the forward and backward pass of the same "
        f"texts, a score {figures['cost']['score']:.2f} times its forward passes."
    )


# --- texts and model ---------------------------------------------------------------------------


def collate(tokenizer: Any, texts: list[Written]) -> Any:
    """A batch of texts, padded on the left, with labels on their answers."""
    records = []
    for one in texts:
        prompt = tokenizer(one.prompt)["input_ids"]
        answer = tokenizer(one.answer, add_special_tokens=False)["input_ids"]
        answer = [*answer, tokenizer.eos_token_id]
        labels = [IGNORED] * len(prompt) + answer
        records.append({"input_ids": prompt + answer, "labels": labels})
    return transformers.DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED)(records)


def by_length(texts: list[Written], batch_size: int) -> list[list[Written]]:
    """Texts in batches, ordered by the length of their prompts."""
    ordered = sorted(texts, key=lambda one: len(one.prompt))
    return [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]


def fine_tuned(
    options: Text, folder: Any, task: WritingTask, tokenizer: Any, device: str
) -> torch.nn.Module:
    """The language model with LoRA, trained on the answers."""
    transformers.set_seed(options.seed)
    settings = Hyperparameters(
        *("gemma-3-270m", LORA, options.batch_size),
        maximum_length=0,
        rank=options.rank,
        alpha=2 * options.rank,
        dropout=0.0,
        learning_rate=options.learning_rate,
    ).for_epochs(options.epochs, len(task.train))
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = with_lora(base.to(device), settings, TaskType.CAUSAL_LM)
    loader = DataLoader(
        task.train,  # pyright: ignore[reportArgumentType]
        options.batch_size,
        shuffle=True,
        collate_fn=partial(collate, tokenizer),
        generator=torch.Generator().manual_seed(options.seed),
    )
    loss = partial(token_loss, TokensModel(model))
    key = [options.seed, repr(settings), repr(task.train)]
    read_or_train(
        model, key, options.cache, lambda: train(model, loader, loss, settings, not options.quiet)
    )
    return model


# --- methods -----------------------------------------------------------------------------------


def methods(
    la: Any, options: Text, task: WritingTask, batches: Callable[[list[Written]], list[Any]]
) -> Iterable[tuple[str, str, Callable[[], Predictor]]]:
    """Methods in turn; the prior precision is chosen before each posterior that uses it."""
    validation, draws = batches(task.validation), options.draws
    first = validation[0]
    yield "MAP", "", lambda: Predictor(la)
    yield "Temperature scaling", "validation", lambda: scaled(la, validation)
    some = batches(task.train[:FEW_TEXTS])
    yield "TFB", "training texts", lambda: training_free(la, draws, some)
    la.optimize_prior_precision("marglik")
    yield "Sampled weights", "evidence", lambda: posterior(la, draws, first, False)
    yield "Linearised", "evidence", lambda: posterior(la, draws, first, True)
    grid: Any = {**GRID, "n_samples": draws, "grid_size": options.grid_size}
    grid["progress_bar"] = not options.quiet
    seed = torch.Generator().manual_seed(options.seed)
    la.optimize_prior_precision("agreement", train_loader=some, generator=seed, **grid)
    yield "Linearised", "agreement", lambda: posterior(la, draws, first, True)
    seed.manual_seed(options.seed)
    la.optimize_prior_precision("gridsearch", val_loader=validation, generator=seed, **grid)
    yield "Sampled weights", "validation", lambda: posterior(la, draws, first, False)
    yield "Linearised", "validation", lambda: posterior(la, draws, first, True)


# --- measures ----------------------------------------------------------------------------------


def quality(predictor: Predictor, texts: list[Any]) -> dict[str, Any]:
    """NLL, accuracy and calibration of tokens under the mixture of all draws."""
    found, confidences, hits = [], [], []
    for batch in texts:
        f, drawn, tokens = predictor(batch)
        of_draws = [logits.softmax(-1) for logits in drawn] or [f.softmax(-1)]
        p = torch.stack(of_draws).mean(0)
        found.append(p.gather(-1, tokens[:, None]).squeeze(-1))
        confidence, place = p.max(-1)
        confidences.append(confidence)
        hits.append(place == tokens)
    p, confidence, hit = torch.cat(found), torch.cat(confidences).clamp(0, 1), torch.cat(hits)
    # A binary question: is the most probable token right?
    error = binary_calibration_error(confidence, hit.long(), n_bins=N_BINS, norm="l1")
    return {
        "tokens": len(hit),
        "token_accuracy": hit.double().mean().item(),
        "nll": -p.clamp_min(torch.finfo(p.dtype).tiny).log().mean().item(),
        "ece": error.item(),
    }


def write_answers(
    la: Any, tokenizer: Any, texts: list[Written], batch_size: int
) -> tuple[list[Written], list[bool]]:
    """What the model itself writes after each prompt, and whether that is wrong."""
    found, wrong = [], []
    for part in by_length(texts, batch_size):
        answers, _ = written_behind(la, tokenizer, part, 0)
        for one, text in zip(part, answers, strict=True):
            found.append(Written(one.prompt, text))
            wrong.append(text.strip() != one.answer.strip())
    return found, wrong


def written_behind(
    la: Any, tokenizer: Any, texts: list[Written], draws: int
) -> tuple[list[str], int]:
    """Greedy answers, and how many tokens they took."""
    prompts = tokenizer([one.prompt for one in texts], padding=True, return_tensors="pt")
    found = la.generate(
        input_ids=prompts["input_ids"],
        attention_mask=prompts["attention_mask"],
        n_samples=draws,
        generator=torch.Generator().manual_seed(0),
        max_new_tokens=LONGEST_ANSWER,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    new = found.sequences[:, prompts["input_ids"].shape[1] :]
    return tokenizer.batch_decode(new, skip_special_tokens=True), new.numel()


def detection(predictor: Predictor, texts: list[Any], wrong: list[bool]) -> list[Row]:
    """How well each score detects wrong answers."""
    signs = defaultdict(list)
    for batch in texts:
        f, drawn, tokens = predictor(batch)
        found = score(f, drawn, tokens, predictor.la.model.labelled(batch))
        signs["log-probability"].append(-found.log_prob)
        signs["summed entropy"].append(found.sums.total)
        signs["summed epistemic"].append(found.sums.epistemic)
        signs["summed sd of log-probability"].append(found.sums.log_prob_sd)
    joined = {name: torch.cat(parts) for name, parts in signs.items()}
    # Without draws there is no epistemic part.
    shown = [name for name in joined if joined["summed epistemic"].any() or name in OF_THE_MODEL]
    return [{"score": name, **detects(joined[name], torch.tensor(wrong))} for name in shown]


def detects(sign: torch.Tensor, wrong: torch.Tensor) -> dict[str, float | None]:
    """AUROC of a sign of wrong answers, and the mean share of wrong answers over all coverages."""
    auroc = None
    if wrong.any() and not wrong.all():
        pairs = mannwhitneyu(sign[wrong].double(), sign[~wrong].double()).statistic
        auroc = float(pairs) / (int(wrong.sum()) * int((~wrong).sum()))
    return {"auroc": auroc, "aurc": risk_coverage(sign, ~wrong)[1].mean().item()}


def speed(
    la: Any, tokenizer: Any, texts: list[Written], draws: int, clock: Clock
) -> dict[str, Any]:
    """Seconds per token written with and without draws, and how many answers the draws change."""
    seconds, answers = {}, {}
    for name, number in (("model", 0), ("predictive", draws)):
        begun = clock()
        answers[name], tokens = written_behind(la, tokenizer, texts, number)
        seconds[name] = (clock() - begun) / tokens
    pairs = zip(answers["model"], answers["predictive"], strict=True)
    return {**seconds, "changed": sum(a != b for a, b in pairs), "of": len(texts)}


def relative_cost(la: Any, batch: Any, draws: int, clock: Clock) -> dict[str, float]:
    """Time of a fit over forward and backward pass, and of a score over its forward passes."""
    weights = [block.weight for block in la.blocks]
    state = la.state_dict()

    def forward() -> None:
        with torch.no_grad():
            la.model(batch)

    def both() -> None:
        torch.autograd.grad(token_loss(la.model, batch), weights)

    def seconds(job: Callable[[], object]) -> float:
        job()
        spent = []
        for _ in range(REPETITIONS):
            begun = clock()
            job()
            spent.append(clock() - begun)
        return min(spent)

    of_score = seconds(lambda: la.score(batch, draws)) / seconds(forward) / (1 + 2 * draws)
    of_fit = seconds(lambda: la.fit([batch])) / seconds(both)
    la.load_state_dict(state)
    return {"fit": of_fit, "score": of_score}
