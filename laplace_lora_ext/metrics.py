"""How good class probabilities `(N, C)` are: calibration and selection."""

from __future__ import annotations

import torch
from torch.nn.functional import nll_loss, one_hot
from torchmetrics.functional.classification import (
    multiclass_accuracy,
    multiclass_calibration_error,
)

N_BINS = 15


def quality(
    probabilities: torch.Tensor, labels: torch.Tensor, n_bins: int = N_BINS
) -> dict[str, float]:
    """Accuracy, negative log-likelihood, expected calibration error and Brier score.

    Parameters
    ----------
    probabilities : torch.Tensor
        `(N, C)`
    labels : torch.Tensor
        `(N,)` class indices
    n_bins : int, default=15
        bins of equal width for the calibration error

    Returns
    -------
    dict
        "accuracy" and "ece" from 0 to 1, "nll" in nats, and "brier" from 0 to 2, all means over
        texts

    Raises
    ------
    ValueError
        If a probability is not finite.
    """
    p, n_classes = checked(probabilities), probabilities.shape[1]
    error = multiclass_calibration_error(p, labels, n_classes, n_bins=n_bins, norm="l1")
    return {
        "accuracy": multiclass_accuracy(p, labels, n_classes, average="micro").item(),
        "nll": negative_log_likelihood(p, labels),
        "ece": error.item(),
        "brier": (p - one_hot(labels, n_classes)).square().sum(-1).mean().item(),
    }


def negative_log_likelihood(probabilities: torch.Tensor, labels: torch.Tensor) -> float:
    """Mean in nats; a probability of 0 counts as the smallest positive number."""
    smallest = torch.finfo(probabilities.dtype).tiny
    return nll_loss(probabilities.clamp_min(smallest).log(), labels).item()


def entropy(probabilities: torch.Tensor) -> torch.Tensor:
    """Entropy of each prediction in nats, `(N,)`."""
    return torch.special.entr(checked(probabilities)).sum(-1)


def risk_coverage(
    uncertainty: torch.Tensor, is_right: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Share of wrong predictions among the k least uncertain ones, for every k.

    Parameters
    ----------
    uncertainty : torch.Tensor
        `(N,)`, such as `entropy`
    is_right : torch.Tensor
        `(N,)` booleans

    Returns
    -------
    coverage, risk : torch.Tensor
        `(N,)` each, in float64; the mean risk is the area under the curve (AURC)
    """
    wrong = (~is_right.bool())[uncertainty.argsort(stable=True)].double()
    counts = torch.arange(1, len(wrong) + 1).to(wrong)
    return counts / len(wrong), wrong.cumsum(0) / counts


def reliability(
    probabilities: torch.Tensor, labels: torch.Tensor, n_bins: int = N_BINS
) -> list[dict[str, float | None]]:
    """Share of texts, mean confidence and accuracy in bins of confidence; None for empty bins."""
    confidence, found = checked(probabilities).max(-1)
    # As in torchmetrics, a bin includes its lower edge, and the last one both edges.
    place = (confidence * n_bins).long().clamp_max(n_bins - 1)
    counts = place.bincount(minlength=n_bins)
    confidences = place.bincount(confidence, minlength=n_bins) / counts
    accuracies = place.bincount((found == labels).double(), minlength=n_bins) / counts
    return [
        {
            "confidence": confidences[i].item() if count else None,
            "accuracy": accuracies[i].item() if count else None,
            "share": count / len(place),
        }
        for i, count in enumerate(counts.tolist())
    ]


def checked(probabilities: torch.Tensor) -> torch.Tensor:
    """Probabilities in float64, clamped to between 0 and 1; an error if one is not finite."""
    if not torch.isfinite(probabilities).all():
        raise ValueError("Probabilities are not finite.")
    # torchmetrics takes anything outside [0, 1] for logits, even a rounding error.
    return probabilities.double().clamp(0, 1)
