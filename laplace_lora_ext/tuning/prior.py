"""What the evidence needs of a posterior's prior, and how to try other prior precisions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from laplace_lora_ext.fitting.moving import follow
from laplace_lora_ext.models.posterior import Posterior


def log_determinant(la: Posterior) -> torch.Tensor:
    """Log-determinant of the prior precision, in float64."""
    log_precision = la.prior_precision.double().log()
    if len(log_precision) == la.n_params:
        return log_precision.sum()
    return (torch.tensor(la._sizes, device=la._device) * log_precision).sum()


def squared_distance(la: Posterior) -> torch.Tensor:
    """Squared distance of the weights from the prior mean under the prior, in float64."""
    squares = (la.mean - la.prior_mean).double().square()
    precision = la.prior_precision.double()
    if len(precision) == la.n_params:
        return squares @ precision
    by_block = torch.stack([part.sum() for part in squares.split(la._sizes)])
    return (by_block * precision).sum()


@contextmanager
def trying(la: Posterior) -> Iterator[None]:
    """Try prior precisions: an error restores the old one."""
    follow(la)
    before = la._prior_precision, la._sigma_noise
    try:
        yield
    except BaseException:
        la._prior_precision, la._sigma_noise = before
        la._posterior_scale = None
        raise
