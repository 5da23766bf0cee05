"""Measures of free text: tokens, written answers, scores, and costs."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_calibration_error

from benchmarks.measuring import Clock, Job, repeated_seconds
from benchmarks.methods.free_text import Predictor, token_loss
from benchmarks.metrics import aurc, auroc
from benchmarks.report import Row
from benchmarks.tasks.free_text import Written, by_length
from laplace_lora_ext.metrics import N_BINS
from laplace_lora_ext.tasks.language import TokensModel
from laplace_lora_ext.text.scores import score

LONGEST_ANSWER = 16  # tokens, more than names and types take
REPETITIONS = 3


def quality(
    predictor: Predictor,
    texts: list[Any],
) -> dict[str, Any]:
    """Measure tokens' NLL, accuracy and calibration by the mixture of draws."""
    p_of_labels = []
    confidences = []
    hits = []
    for batch in texts:
        f, drawn, tokens = predictor(batch)
        draws = [logits.softmax(-1) for logits in drawn]
        if not draws:  # the model predicts alone
            draws = [f.softmax(-1)]
        p = torch.stack(draws).mean(0)
        confidence, predicted = p.max(-1)
        p_of_label = p.gather(-1, tokens[:, None])
        p_of_labels.append(p_of_label.squeeze(-1))
        confidences.append(confidence)
        hits.append(predicted == tokens)
    p = torch.cat(p_of_labels)
    hit = torch.cat(hits)
    # A binary question: is the most probable token right?
    # A mean of probabilities may be above 1 by rounding, which the measure refuses.
    confidence = torch.cat(confidences).clamp(0, 1)
    error = binary_calibration_error(confidence, hit.long(), N_BINS, norm="l1")
    # A token's probability may be too small for its precision.
    smallest = torch.finfo(p.dtype).tiny
    log_p = p.clamp_min(smallest).log()
    return {
        "tokens": len(hit),
        "token_accuracy": hit.double().mean().item(),
        "nll": -log_p.mean().item(),
        "ece": error.item(),
    }


def write_answers(
    la: Any,
    tokenizer: Any,
    texts: list[Written],
    batch_size: int,
) -> tuple[list[Written], list[bool]]:
    """Let the model itself write after each prompt, and say whether that is wrong."""
    written = []
    wrong = []
    for part in by_length(texts, batch_size):
        # All methods judge the same answers, the model's own.
        answers = written_behind(la.model.model, tokenizer, part)
        for one, answer in zip(part, answers, strict=True):
            written.append(Written(one.prompt, answer))
            is_right = answer.strip() == one.answer.strip()
            wrong.append(not is_right)
    return written, wrong


@torch.no_grad()
def written_behind(model: Any, tokenizer: Any, texts: list[Written]) -> list[str]:
    """Write greedy answers."""
    asked = [one.prompt for one in texts]
    prompts = tokenizer(asked, padding=True, return_tensors="pt").to(model.device)
    written = model.eval().generate(
        input_ids=prompts["input_ids"],
        attention_mask=prompts["attention_mask"],
        max_new_tokens=LONGEST_ANSWER,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    # What is generated begins with the prompts.
    _, length = prompts["input_ids"].shape
    return tokenizer.batch_decode(written[:, length:], skip_special_tokens=True)


def detection(
    predictor: Predictor,
    texts: list[Any],
    wrong: list[bool],
) -> list[Row]:
    """Measure how well each score detects wrong answers."""
    scores = []
    for batch in texts:
        f, drawn, tokens = predictor(batch)
        model = predictor.la.model
        assert isinstance(model, TokensModel)  # of all posteriors over texts
        labelled = model.labelled(batch)
        scores.append(score(f, drawn, tokens, labelled))
    # The higher, the more doubtful.
    signs = {
        "log-probability": [-each.log_prob for each in scores],
        "summed entropy": [each.sums.total for each in scores],
    }
    epistemic = [each.sums.epistemic for each in scores]
    if any(each.any() for each in epistemic):  # there are draws
        signs["summed epistemic"] = epistemic
        signs["summed sd of log-probability"] = [
            each.sums.log_prob_sd for each in scores
        ]
    is_wrong = torch.tensor(wrong)
    rows = []
    for name, parts in signs.items():
        row = detects(torch.cat(parts), is_wrong)
        rows.append({"score": name, **row})
    return rows


def detects(
    sign: Tensor,
    wrong: Tensor,
) -> dict[str, float | None]:
    """Compute a sign's AUROC for wrong answers, and their mean share.

    The share is that over all coverages.
    """
    return {"auroc": auroc(sign, wrong), "aurc": aurc(sign, wrong)}


def relative_cost(
    la: Any,
    batch: Any,
    draws: int,
    clock: Clock,
) -> dict[str, float]:
    """Time a fit in passes, and a score in forward passes."""
    weights = [block.weight for block in la.blocks]
    state = la.state_dict()

    def seconds(job: Job) -> float:
        return repeated_seconds(job, REPETITIONS, clock=clock).minimum

    def both_passes() -> None:
        loss = token_loss(la.model, batch)
        torch.autograd.grad(loss, weights)

    with torch.no_grad():
        of_forward = seconds(lambda: la.model(batch))
    of_both = seconds(both_passes)
    of_score = seconds(lambda: la.score(batch, draws))
    of_fit = seconds(lambda: la.fit([batch]))
    # The fits were to one batch.
    la.load_state_dict(state)
    n_passes = 1 + draws
    return {
        "fit_ratio": of_fit / of_both,
        "score_ratio": of_score / (n_passes * of_forward),
    }
