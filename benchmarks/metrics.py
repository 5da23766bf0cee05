"""What is measured of class probabilities (texts, classes): calibration, and uncertainty."""

import math
from typing import Any

import pandas as pd
import torch
from torch.nn.functional import nll_loss, one_hot
from torchmetrics.functional.classification import (
    binary_auroc,
    multiclass_accuracy,
    multiclass_calibration_error,
)

NUMBER_OF_BINS = 15
CALIBRATED_DRAWS = 50  # of labels
COVERAGES = tuple(number / 20 for number in range(1, 21))


def quality(probabilities: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Accuracy, mean negative log-likelihood, expected calibration error, Brier score (0 to 2)."""
    p, classes = _checked(probabilities), probabilities.shape[1]
    error = multiclass_calibration_error(p, labels, classes, n_bins=NUMBER_OF_BINS, norm="l1")
    return {
        "accuracy": multiclass_accuracy(p, labels, classes, average="micro").item(),
        "nll": negative_log_likelihood(p, labels),
        "ece": error.item(),
        "brier": (p - one_hot(labels, classes)).square().sum(-1).mean().item(),
    }


def negative_log_likelihood(probabilities: torch.Tensor, labels: torch.Tensor) -> float:
    """Mean in nats; a probability of 0 counts as the smallest number."""
    smallest = torch.finfo(probabilities.dtype).tiny
    return nll_loss(probabilities.clamp_min(smallest).log(), labels).item()


def calibrated_ece(probabilities: torch.Tensor) -> float:
    """ECE that these probabilities would have if they were right, from labels drawn from them.

    The bins of a finite set of texts are uneven by chance: calibration can't be seen to be better.
    """
    draws = torch.Generator().manual_seed(0)
    labels = torch.multinomial(_checked(probabilities), CALIBRATED_DRAWS, True, generator=draws)
    errors = [quality(probabilities, drawn)["ece"] for drawn in labels.T]
    return sum(errors) / len(errors)


def shift_detection(test: torch.Tensor, shifted: torch.Tensor) -> dict[str, float]:
    """Mean entropies in nats, and the AUROC of the entropy as a sign of a shifted text."""
    inside, outside = entropy(test), entropy(shifted)
    # torchmetrics takes scores in [0, 1] as they are.
    scores = torch.cat([inside, outside]) / math.log(test.shape[1])
    is_shifted = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))]).long()
    return {
        "test_entropy": inside.mean().item(),
        "shifted_entropy": outside.mean().item(),
        "shift_auroc": binary_auroc(scores.clamp(0, 1), is_shifted).item(),
    }


def entropy(probabilities: torch.Tensor) -> torch.Tensor:
    """Entropy of each prediction in nats."""
    return torch.special.entr(_checked(probabilities)).sum(-1)


def reliability(probabilities: torch.Tensor, labels: torch.Tensor) -> list[dict[str, float | None]]:
    """Share of texts, mean confidence and accuracy in bins of the confidence; None if empty."""
    confidence, found = _checked(probabilities).max(-1)
    # Like torchmetrics, a bin includes its lower edge; the last one has both.
    place = (confidence * NUMBER_OF_BINS).long().clamp_max(NUMBER_OF_BINS - 1).numpy()
    texts: Any = pd.DataFrame({"confidence": confidence, "accuracy": (found == labels).double()})
    bins = texts.groupby(place).mean().reindex(range(NUMBER_OF_BINS)).astype(object)
    shares = pd.Series(place).value_counts(normalize=True).reindex(bins.index, fill_value=0.0)
    return bins.where(bins.notna(), None).assign(share=shares).to_dict("records")


def selective_accuracy(probabilities: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """Accuracy on the predictions of least entropy alone, at `COVERAGES`; no class is wrong."""
    order = entropy(probabilities).argsort(stable=True)
    is_right = (probabilities.argmax(-1) == labels)[order].double()
    counts = [max(1, round(coverage * len(labels))) for coverage in COVERAGES]
    return [is_right[:count].mean().item() for count in counts]


def _checked(probabilities: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(probabilities).all():
        raise ValueError("A method predicted probabilities that are not finite.")
    # torchmetrics takes anything outside [0, 1] for logits, even a rounding error.
    return probabilities.double().clamp(0, 1)
