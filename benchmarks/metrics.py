"""Measures of class probabilities (texts, classes): bins of confidence, and shifted texts."""

import math

import torch
from torchmetrics.functional.classification import binary_auroc

from laplace_lora_ext.metrics import N_BINS


def shift_detection(
    test: torch.Tensor,
    shifted: torch.Tensor,
) -> dict[str, float]:
    """Compute mean entropies in nats, and how well entropy detects shifted texts (AUROC)."""
    of_test = entropies(test)
    of_shifted = entropies(shifted)
    # torchmetrics leaves scores in [0, 1] as they are, and the largest entropy is that of chance.
    largest = math.log(test.shape[1])
    scores = torch.cat([of_test, of_shifted]) / largest
    is_shifted = torch.arange(len(scores)) >= len(test)
    return {
        "test_entropy": of_test.mean().item(),
        "shifted_entropy": of_shifted.mean().item(),
        "shift_auroc": binary_auroc(scores.clamp(0, 1), is_shifted.long()).item(),
    }


def entropies(probabilities: torch.Tensor) -> torch.Tensor:
    """Compute the entropy (texts,) of each text's probabilities, in nats."""
    return torch.special.entr(probabilities.double()).sum(-1)


def reliability(
    probabilities: torch.Tensor,
    labels: torch.Tensor,
) -> dict[str, list[float]]:
    """Compute share of texts and accuracy in bins of confidence."""
    confidence, predicted = probabilities.max(-1)
    # A confidence of 1 belongs to the last bin.
    place = (confidence * N_BINS).long().clamp_max(N_BINS - 1)
    counts = place.bincount(minlength=N_BINS)
    is_right = (predicted == labels).double()
    right = place.bincount(weights=is_right, minlength=N_BINS)
    share = counts / len(labels)
    # An empty bin has an accuracy of 0, and no height in diagrams.
    accuracy = right / counts.clamp_min(1)
    return {
        "share": share.tolist(),
        "accuracy": accuracy.tolist(),
    }
