"""Measures of class probabilities (texts, classes): bins of confidence, and shifted texts."""

import math

import torch
from torchmetrics.functional.classification import binary_auroc

from laplace_lora_ext.metrics import N_BINS


def shift_detection(test: torch.Tensor, shifted: torch.Tensor) -> dict[str, float]:
    """Mean entropies in nats, and how well entropy detects shifted texts (AUROC)."""
    inside, outside = (torch.special.entr(p.double()).sum(-1) for p in (test, shifted))
    # torchmetrics leaves scores in [0, 1] as they are.
    scores = torch.cat([inside, outside]) / math.log(test.shape[1])
    is_shifted = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))]).long()
    return {
        "test_entropy": inside.mean().item(),
        "shifted_entropy": outside.mean().item(),
        "shift_auroc": binary_auroc(scores.clamp(0, 1), is_shifted).item(),
    }


def reliability(probabilities: torch.Tensor, labels: torch.Tensor) -> dict[str, list[float]]:
    """Share of texts and accuracy in bins of confidence."""
    confidence, found = probabilities.max(-1)
    place = (confidence * N_BINS).long().clamp_max(N_BINS - 1)
    counts = place.bincount(minlength=N_BINS)
    accuracy = place.bincount((found == labels).double(), N_BINS) / counts.clamp_min(1)
    return {"share": (counts / len(labels)).tolist(), "accuracy": accuracy.tolist()}
