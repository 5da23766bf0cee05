"""Measures of class probabilities (texts, classes): calibration and uncertainty."""

import math

import torch
from torchmetrics.functional.classification import binary_auroc

from laplace_lora_ext.metrics import checked, entropy, quality

CALIBRATED_DRAWS = 50  # of labels


def calibrated_ece(probabilities: torch.Tensor) -> float:
    """The ECE that these probabilities would have if they were right: on labels drawn from them.

    Of a finite number of texts, no method can be shown to have a lower one.
    """
    draws = torch.Generator().manual_seed(0)
    labels = torch.multinomial(checked(probabilities), CALIBRATED_DRAWS, True, generator=draws)
    errors = [quality(probabilities, drawn)["ece"] for drawn in labels.T]
    return sum(errors) / len(errors)


def shift_detection(test: torch.Tensor, shifted: torch.Tensor) -> dict[str, float]:
    """Mean entropies in nats, and how well entropy detects shifted texts (AUROC)."""
    inside, outside = entropy(test), entropy(shifted)
    # torchmetrics leaves scores in [0, 1] as they are.
    scores = torch.cat([inside, outside]) / math.log(test.shape[1])
    is_shifted = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))]).long()
    return {
        "test_entropy": inside.mean().item(),
        "shifted_entropy": outside.mean().item(),
        "shift_auroc": binary_auroc(scores.clamp(0, 1), is_shifted).item(),
    }
