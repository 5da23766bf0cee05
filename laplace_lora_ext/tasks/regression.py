"""Numbers, with Gaussian noise."""

from __future__ import annotations

import torch
from torch import Tensor

from laplace_lora_ext.messages import warn
from laplace_lora_ext.tasks.task import Task


class Regression(Task):
    """Gaussian noise of variance 1, which the posterior scales by `sigma_noise`.

    Outputs and targets are `(B, C)`; targets of a single output may be `(B,)`.
    """

    name = "regression"
    name_for_host = "regression"
    has_noise = True
    instead_of_logit_scale = "sigma_noise"

    def predictions(self, logits: Tensor) -> Tensor:
        return logits

    def features(self, logits: Tensor) -> Tensor:
        return logits

    def times_root(self, logits: Tensor, z: Tensor) -> Tensor:
        return z

    def columns_by_size(self, logits: Tensor) -> Tensor:
        _, n_outputs = logits.shape
        alike = torch.arange(n_outputs, device=logits.device)
        return alike.expand(logits.shape)

    def draws_save(self, logits: Tensor, n_passes: int) -> bool:
        """Say no: outputs weigh alike, and none of their columns is next to nothing."""
        return False

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return (logits - y).square().sum() / 2

    def as_targets(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        return as_columns(y, dtype)

    def check_targets(self, y: Tensor, logits: Tensor) -> Tensor:
        targets = self.as_targets(y.to(logits.device), logits.dtype)
        check_columns(y, targets, logits, "targets must be {}")
        if not torch.isfinite(targets).all():
            raise ValueError("non-finite targets: leave such examples out")
        return targets

    def warn_of_all(self, are_binary: bool) -> None:
        if are_binary:
            warn(
                'Every target is 0 or 1, but the likelihood "regression" takes them '
                "for numbers. If the model was trained by a sigmoid, use "
                '"multi_label_classification".'
            )

    def check_classes(self, name: str) -> None:
        raise ValueError(
            f"{name} predicts numbers, which have no probabilities: use la.predict(x)."
        )


REGRESSION = Regression()


def as_columns(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Bring targets `(B, C)` to a type; those of a single output may be `(B,)`."""
    return (y[:, None] if y.ndim == 1 else y).to(dtype)


def check_columns(y: Tensor, targets: Tensor, outputs: Tensor, must_be: str) -> None:
    """Refuse targets that are not of the outputs' shape `(B, C)`, given as `y`."""
    if targets.shape == outputs.shape:
        return
    found = f"{must_be.format(tuple(outputs.shape))}, not {tuple(y.shape)}"
    if y.ndim == 1 and not y.is_floating_point():
        found += ': class indices are for the likelihood "classification"'
    raise ValueError(found)


def gaussian_log_density(mean: Tensor, covariance: Tensor, y: Tensor) -> Tensor:
    """Compute the log-density `(...)` of targets `(..., C)`, in nats.

    A `torch.linalg.LinAlgError` if a matrix `(..., C, C)` is no covariance.
    """
    density = torch.distributions.MultivariateNormal(
        mean, covariance, validate_args=False
    )
    return density.log_prob(y)
