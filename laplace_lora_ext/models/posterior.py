"""What choosing a prior and predicting need of a posterior."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Hyperparameters:
    """What a search may change of a posterior, named as its attributes."""

    prior_precision: torch.Tensor
    sigma_noise: torch.Tensor
    temperature: float | torch.Tensor
    logit_scale: float
