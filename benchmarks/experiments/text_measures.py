"""Measures of free text: tokens, written answers, what scores tell about them, and costs."""

from collections import defaultdict
from typing import Any

import torch
from scipy.stats import mannwhitneyu
from torchmetrics.functional.classification import binary_calibration_error

from benchmarks.measuring import Clock, Job, repeated_seconds
from benchmarks.methods.free_text import Predictor, token_loss
from benchmarks.report import Row
from benchmarks.tasks.free_text import Written, by_length
from laplace_lora_ext.metrics import N_BINS
from laplace_lora_ext.text.scores import score

OF_THE_MODEL = ("log-probability", "summed entropy")  # scores that need no draws
LONGEST_ANSWER = 16  # tokens
REPETITIONS = 3


def quality(predictor: Predictor, texts: list[Any]) -> dict[str, Any]:
    """NLL, accuracy and calibration of tokens under the mixture of all draws."""
    found = []
    for batch in texts:
        f, drawn, tokens = predictor(batch)
        p = torch.stack([logits.softmax(-1) for logits in drawn] or [f.softmax(-1)]).mean(0)
        confidence, place = p.max(-1)
        found.append((p.gather(-1, tokens[:, None]).squeeze(-1), confidence, place == tokens))
    p, confidence, hit = (torch.cat(part) for part in zip(*found, strict=True))
    # A binary question: is the most probable token right?
    error = binary_calibration_error(confidence.clamp(0, 1), hit.long(), N_BINS, norm="l1")
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
        **{key: prompts[key] for key in ("input_ids", "attention_mask")},
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
    n_wrong = wrong[sign.argsort(stable=True)].double().cumsum(0)  # among the least doubtful
    return {"auroc": auroc, "aurc": (n_wrong / torch.arange(1, len(sign) + 1)).mean().item()}


def speed(
    la: Any, tokenizer: Any, texts: list[Written], draws: int, clock: Clock
) -> dict[str, Any]:
    """Seconds per token written with and without draws, and how many answers the draws change."""
    seconds, answers = {}, {}
    for name, number in (("model", 0), ("predictive", draws)):
        begun = clock()
        answers[name], tokens = written_behind(la, tokenizer, texts, number)
        seconds[f"{name}_seconds"] = (clock() - begun) / tokens
    pairs = zip(answers["model"], answers["predictive"], strict=True)
    return {**seconds, "changed_answers": sum(a != b for a, b in pairs)}


def relative_cost(la: Any, batch: Any, draws: int, clock: Clock) -> dict[str, float]:
    """Time of a fit over forward and backward pass, and of a score over its forward passes."""
    weights = [block.weight for block in la.blocks]
    state = la.state_dict()

    def seconds(job: Job) -> float:
        return repeated_seconds(job, REPETITIONS, clock=clock)["minimum"]

    with torch.no_grad():
        of_forward = seconds(lambda: la.model(batch))
    of_both = seconds(lambda: torch.autograd.grad(token_loss(la.model, batch), weights))
    of_score = seconds(lambda: la.score(batch, draws))
    of_fit = seconds(lambda: la.fit([batch]))
    la.load_state_dict(state)
    return {
        "fit_ratio": of_fit / of_both,
        "score_ratio": of_score / of_forward / (1 + draws),
    }
