"""Numbers, with Gaussian noise."""

from __future__ import annotations

import torch
from torch import Tensor

from laplace_lora_ext.tasks.task import Task


class Regression(Task):
    """Gaussian noise of variance 1, which the posterior scales by `sigma_noise`.

    Outputs and targets are `(B, C)`; targets of a single output may be `(B,)`.
    """

    name = "regression"
    name_for_host = "regression"
    has_noise = True

    def times_root(self, logits: Tensor, z: Tensor) -> Tensor:
        return z

    def columns_by_size(self, logits: Tensor) -> Tensor:
        _, n_outputs = logits.shape
        alike = torch.arange(n_outputs, device=logits.device)
        return alike.expand(logits.shape)

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return (logits - y).square().sum() / 2

    def check_targets(self, y: Tensor, logits: Tensor) -> Tensor:
        targets = in_columns(y).to(logits)
        if targets.shape != logits.shape:
            raise ValueError(
                f"targets must be {tuple(logits.shape)}, not {tuple(y.shape)}: class "
                'indices are for the likelihood "classification"'
            )
        if not torch.isfinite(targets).all():
            raise ValueError("non-finite targets: leave such examples out")
        return targets


REGRESSION = Regression()


def in_columns(y: Tensor) -> Tensor:
    """Return targets `(B, C)`; those of a single output may be `(B,)`."""
    return y[:, None] if y.ndim == 1 else y
