"""Gaussian logits: what a posterior says about a batch, before a link makes it probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch


class Moments(NamedTuple):
    """Mean and covariance of the logits of N examples under the linearised model.

    A Laplace approximation takes them in place of a batch, with `pred_type="glm"`.

    Attributes
    ----------
    f_mu : torch.Tensor
        `(N, C)`
    f_var : torch.Tensor
        `(N, C, C)`
    """

    f_mu: torch.Tensor
    f_var: torch.Tensor

    def to(self, *args: object, **kwargs: object) -> Moments:
        """Convert both as `torch.Tensor.to` does."""
        return Moments(self.f_mu.to(*args, **kwargs), self.f_var.to(*args, **kwargs))  # pyright: ignore[reportCallIssue, reportArgumentType]

    def split(self, sizes: int | list[int]) -> Iterator[Moments]:
        """Consecutive examples in parts of the given sizes, or of one size."""
        pairs = zip(self.f_mu.split(sizes), self.f_var.split(sizes), strict=True)
        return (Moments(f_mu, f_var) for f_mu, f_var in pairs)


def centred(f_var: torch.Tensor) -> torch.Tensor:
    """Covariances `(B, C, C)` without what all logits of an example share: J V J, J = I - 11ᵀ/C.

    Variances of differences of two logits stay as they are.
    """
    rows = f_var - f_var.mean(-1, keepdim=True)
    return rows - rows.mean(-2, keepdim=True)


def uncorrelated(f_var: torch.Tensor) -> torch.Tensor:
    """Covariances `(B, C, C)` with everything but the variances set to 0."""
    return torch.diag_embed(f_var.diagonal(dim1=-2, dim2=-1))
