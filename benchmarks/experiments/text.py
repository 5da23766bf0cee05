"""Free text: calibration of tokens, and uncertainty as a detector of wrong answers."""

import time
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from scipy.stats import rankdata
from torch.utils.data import DataLoader
from torchmetrics.functional.classification import binary_calibration_error

import laplace_lora_ext
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
from laplace_lora_ext.metrics import N_BINS
from laplace_lora_ext.models.tokens_model import TokensModel
from laplace_lora_ext.text.scores import Scores, score

LORA = ("q_proj", "v_proj")
LONGEST_ANSWER = 16  # tokens
FEW_TEXTS = 16  # of training, for ways to choose that look at draws
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
    """Fine-tune, fit, measure every method, and write figures and tables."""
    if options.threads:
        torch.set_num_threads(options.threads)
    started = time.perf_counter()
    task, device = read(options), device_of(options.device)
    # Seconds of the processor do not depend on what else it does.
    clock = time.process_time if device == "cpu" else time.perf_counter
    folder = options.model or gemma_folder(options.cache)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.pad_token or tokenizer.eos_token, "left"
    batches = partial(batches_of, tokenizer, options.batch_size)
    model = fine_tuned(options, folder, task, tokenizer, device)
    trained = time.perf_counter()
    la: Any = laplace_lora_ext.Laplace(
        model, "language_modeling", subset_of_weights="lora", hessian_structure="lowrank_kron"
    )
    torch.manual_seed(options.seed)
    begun = clock()
    la.fit(batches(task.train), progress_bar=not options.quiet)
    fitted = clock() - begun
    written = write_answers(la, tokenizer, task.test, options.batch_size)
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
        found = detection(predictor, batches(written["texts"]), written["wrong"])
        detectors += [{"name": name, "chosen_by": chosen_by, **one} for one in found]
    spent = speed(la, tokenizer, task.test[: options.written_examples], options.draws, clock)
    cost = relative_cost(la, batches(task.train)[-1], options.draws, clock)
    figures: Figures = {
        **provenance(options, device),
        "methods": rows,
        "detectors": detectors,
        "answers": {"wrong": sum(written["wrong"]), "of": len(written["wrong"])},
        "generation": spent,
        "cost": cost,
        "seconds": {
            "training": trained - started,
            "fit": fitted,
            "in_all": time.perf_counter() - started,
        },
    }
    write(options.output, "text", figures, report(figures, options))
    return figures


def report(figures: Figures, options: Text) -> str:
    """Both tables and what they were measured with."""
    answers, seconds, spent = figures["answers"], figures["seconds"], figures["generation"]
    summary = (
        f"Task {options.task}, seed {options.seed}: {options.train_examples} training and "
        f"{options.test_examples} test texts, {options.draws} draws; {answers['wrong']} of "
        f"{answers['of']} written answers are wrong. {hardware_of(figures)}; "
        f"{seconds['in_all']:.0f} s in all, of which the fit took {seconds['fit']:.0f} s.\n"
        f"Written under the predictive: {spent['predictive']:.2f} s a token, by the model itself "
        f"{spent['model']:.2f} s; {spent['changed']} of {spent['of']} answers differ.\n"
        f"A fit takes {figures['cost']['fit']:.2f} times the forward and backward pass of the same "
        f"texts, a score {figures['cost']['score']:.2f} times its forward passes."
    )
    parts = (
        table(figures["methods"], QUALITY, TITLES),
        table(figures["detectors"], DETECTION, TITLES),
    )
    return "\n\n".join((summary, *parts))


# --- texts and model ---------------------------------------------------------------------------


def batches_of(tokenizer: Any, batch_size: int, texts: list[Written]) -> list[dict[str, Any]]:
    """Texts by their length, padded on the left, with labels on their answers."""
    ordered = sorted(texts, key=lambda one: len(one.prompt))
    parts = [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]
    return [collate(tokenizer, part) for part in parts]


def collate(tokenizer: Any, texts: list[Written]) -> dict[str, torch.Tensor]:
    rows = []
    for one in texts:
        prompt = tokenizer(one.prompt)["input_ids"]
        answer = tokenizer(one.answer, add_special_tokens=False)["input_ids"]
        rows.append((prompt, [*answer, tokenizer.eos_token_id]))
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    padding = tokenizer.pad_token_id
    found: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for prompt, answer in rows:
        left = length - len(prompt) - len(answer)
        found["input_ids"].append([padding] * left + prompt + answer)
        found["attention_mask"].append([0] * left + [1] * (length - left))
        found["labels"].append([-100] * (left + len(prompt)) + answer)
    return {key: torch.tensor(value) for key, value in found.items()}


def fine_tuned(
    options: Text, folder: Any, task: WritingTask, tokenizer: Any, device: str
) -> torch.nn.Module:
    """The language model with LoRA, trained on the answers."""
    transformers.set_seed(options.seed)
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=options.rank,
        lora_alpha=2 * options.rank,
        target_modules=list(LORA),
    )
    model: Any = get_peft_model(base.to(device), config)
    settings = Hyperparameters(
        "gemma-3-270m",
        LORA,
        options.batch_size,
        maximum_length=0,
        rank=options.rank,
        learning_rate=options.learning_rate,
    ).for_epochs(options.epochs, len(task.train))
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
    """Each method when its turn comes: those of a posterior follow the choice of its prior."""
    validation, draws = batches(task.validation), options.draws
    first = validation[0]
    yield "MAP", "", lambda: Predictor(la)
    yield "Temperature scaling", "validation", lambda: scaled(la, validation)
    some = batches(task.train[:FEW_TEXTS])
    yield "TFB", "training texts", lambda: training_free(la, draws, some)
    la.optimize_prior_precision("marglik")
    yield "Sampled weights", "evidence", lambda: posterior(la, draws, first, False)
    yield "Linearised", "evidence", lambda: posterior(la, draws, first, True)
    draws_of_prior: Any = {
        "n_samples": draws,
        "grid_size": options.grid_size,
        "progress_bar": not options.quiet,
        **GRID,
    }
    seed = torch.Generator().manual_seed(options.seed)
    la.optimize_prior_precision("agreement", train_loader=some, generator=seed, **draws_of_prior)
    yield "Linearised", "agreement", lambda: posterior(la, draws, first, True)
    la.optimize_prior_precision(
        "gridsearch",
        val_loader=validation,
        generator=seed.manual_seed(options.seed),
        **draws_of_prior,
    )
    yield "Sampled weights", "validation", lambda: posterior(la, draws, first, False)
    yield "Linearised", "validation", lambda: posterior(la, draws, first, True)


# --- measures ----------------------------------------------------------------------------------


def quality(predictor: Predictor, texts: list[Any]) -> dict[str, Any]:
    """NLL, accuracy and calibration of every token under the mixture over draws."""
    losses, confidences, hits = [], [], []
    for batch in texts:
        f, drawn, tokens = predictor(batch)
        of_draws = [logits.softmax(-1) for logits in drawn] or [f.softmax(-1)]
        p = torch.stack(of_draws).mean(0)
        smallest = torch.finfo(p.dtype).tiny
        losses.append(-p.gather(-1, tokens[:, None]).clamp_min(smallest).log().squeeze(-1))
        confidence, place = p.max(-1)
        confidences.append(confidence)
        hits.append(place == tokens)
    confidence, hit = torch.cat(confidences).clamp(0, 1), torch.cat(hits)
    # Of one class, "right": the probability of the most probable token is that of being so.
    error = binary_calibration_error(confidence, hit.long(), n_bins=N_BINS, norm="l1")
    return {
        "tokens": len(hit),
        "token_accuracy": hit.double().mean().item(),
        "nll": torch.cat(losses).mean().item(),
        "ece": error.item(),
    }


def write_answers(
    la: Any, tokenizer: Any, texts: list[Written], batch_size: int
) -> dict[str, list[Any]]:
    """What the model itself writes behind each prompt, and whether that is wrong."""
    ordered = sorted(texts, key=lambda one: len(one.prompt))
    found, wrong = [], []
    for i in range(0, len(ordered), batch_size):
        part = ordered[i : i + batch_size]
        answers = written_behind(la, tokenizer, part, 0)[0]
        found += [Written(one.prompt, text) for one, text in zip(part, answers, strict=True)]
        wrong += [
            text.strip() != one.answer.strip() for one, text in zip(part, answers, strict=True)
        ]
    return {"texts": found, "wrong": wrong}


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
    """How well each score of an answer tells the wrong ones."""
    parts = []
    for batch in texts:
        f, drawn, tokens = predictor(batch)
        found = score(f, drawn, tokens, predictor.la.model.labelled(batch))
        numbers = {field.name: getattr(found.sums, field.name) for field in fields(Scores)}
        parts.append(numbers | {"text": found.log_prob})
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    signs = {"log-probability": -joined["text"], "summed entropy": joined["total"]}
    if joined["epistemic"].any():
        signs["summed epistemic"] = joined["epistemic"]
        signs["summed sd of log-probability"] = joined["log_prob_sd"]
    return [{"score": name, **detects(sign, wrong)} for name, sign in signs.items()]


def detects(sign: torch.Tensor, wrong: list[bool]) -> dict[str, float | None]:
    """AUROC of a sign of wrong answers, and the mean share of wrong ones over all coverages."""
    is_wrong = torch.tensor(wrong).double()
    n_wrong = int(is_wrong.sum())
    n_right = len(wrong) - n_wrong
    ranks = torch.from_numpy(rankdata(sign.double().numpy()))
    pairs = ranks[is_wrong.bool()].sum().item() - n_wrong * (n_wrong + 1) / 2
    risks = is_wrong[sign.argsort(stable=True)].cumsum(0) / torch.arange(1, len(wrong) + 1)
    auroc = pairs / (n_wrong * n_right) if n_wrong and n_right else None
    return {"auroc": auroc, "aurc": risks.mean().item()}


def speed(
    la: Any, tokenizer: Any, texts: list[Written], draws: int, clock: Clock
) -> dict[str, Any]:
    """Seconds a token of texts that are written with and without draws, and what draws change."""
    seconds, answers = {}, {}
    for name, number in (("model", 0), ("predictive", draws)):
        begun = clock()
        answers[name], tokens = written_behind(la, tokenizer, texts, number)
        seconds[name] = (clock() - begun) / tokens
    pairs = zip(answers["model"], answers["predictive"], strict=True)
    return {**seconds, "changed": sum(a != b for a, b in pairs), "of": len(texts)}


def relative_cost(la: Any, batch: Any, draws: int, clock: Clock) -> dict[str, float]:
    """Time of a fit beside forward and backward pass, and of a score beside its forward passes."""
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
