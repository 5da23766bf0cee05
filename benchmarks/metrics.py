"""Measures of class probabilities (texts, classes): how they tell shifted texts."""

import math

import torch
from torchmetrics.functional.classification import binary_auroc


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
