"""Contrasts: how far other logits are from the most probable one, as many as matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from laplace_lora_ext.messages import check_counts

MOST = 8
"""Contrasts that are computed unless more are asked for: each takes a backward pass."""

# Classes are left out that have less probability than this all together, at this
# temperature: a posterior makes a model less sure.
_LEFT_OUT = 1e-3
_TEMPERATURE = 2.0

NO_CLASS = -1
"""In the place of a class, where an example needs fewer contrasts than another."""


@dataclass(frozen=True)
class Contrasts:
    """Chooses for each example which logits to compare with its most probable one.

    They are those of the next most probable classes, by the model's own probabilities:
    until what is left has less than 0.001 of the probability at twice the temperature,
    and at most 8. Nothing depends on the other examples of a batch.

    Parameters
    ----------
    n_contrasts : int, optional
        take this many, or all where there are fewer
    """

    n_contrasts: int | None = None

    def __post_init__(self) -> None:
        if self.n_contrasts is not None:
            check_counts(n_contrasts=self.n_contrasts)

    def most(self, n_outputs: int) -> int:
        """Return how many contrasts an example may have."""
        return min(self.n_contrasts or MOST, n_outputs - 1)

    def are_all(self, n_outputs: int) -> bool:
        """Tell whether every class is compared, so that covariances are exact."""
        return self.most(n_outputs) == n_outputs - 1

    def classes(self, logits: Tensor) -> Tensor:
        """List each example's classes `(B, 1 + k)`, the most probable one first.

        k is the largest number that an example needs; where one needs fewer, -1
        follows.
        """
        n_outputs = logits.shape[-1]
        order = logits.argsort(dim=-1, descending=True, stable=True)
        classes = order[:, : 1 + self.most(n_outputs)]
        if self.n_contrasts is not None or self.are_all(n_outputs):
            return classes
        probabilities = (logits / _TEMPERATURE).softmax(-1)
        included = probabilities.gather(1, classes).cumsum(1)
        is_needed = torch.ones_like(classes, dtype=torch.bool)
        # What is known of one class says the most of all others: one is always
        # compared.
        by_those_before = included[:, 1:-1]
        is_needed[:, 2:] = by_those_before < 1 - _LEFT_OUT
        n_needed = int(is_needed.sum(1).amax())
        classes = torch.where(is_needed, classes, NO_CLASS)
        return classes[:, :n_needed]

    def directions(self, logits: Tensor) -> Tensor:
        """Make the vectors `(k, B, C)` that a backward pass takes for each contrast."""
        classes = self.classes(logits)
        identity = torch.eye(logits.shape[-1]).to(logits)
        rows = identity[classes.clamp_min(0)]  # (B, 1 + k, C)
        is_known = classes[:, 1:] != NO_CLASS
        others, first = rows[:, 1:], rows[:, :1]
        vectors = torch.where(is_known[..., None], others - first, 0)
        return vectors.transpose(0, 1)


class AlikeCovariances(NamedTuple):
    """Covariances of groups of classes: those of one group are alike.

    The groups are the most probable class, each of k others alone, and all that are
    left. Where an example needs fewer contrasts, some groups have no class.

    Attributes
    ----------
    variances : torch.Tensor
        `(B, k + 2)`, a class's own
    covariances : torch.Tensor
        `(B, k + 2, k + 2)`, of two classes by their groups; on the diagonal, of two
        that are in the same one
    """

    variances: Tensor
    covariances: Tensor


def alike(covariance: Tensor, classes: Tensor) -> AlikeCovariances:
    """Tell from contrasts' covariances `(B, k, k)` those of all classes, by groups.

    Those of the most probable class are 0. So they differ from those of the logits, but
    say the same of every difference of two that is known.

    The classes that are left are taken to be like the known ones: their variance is the
    mean of the known variances, and the covariance of two of them the mean of the known
    covariances. Their covariance with the known ones is that of one of several
    quantities that are all alike, predicted from the others by their sum. Nothing of
    this makes a negative eigenvalue.

    Parameters
    ----------
    covariance : torch.Tensor
        `(B, k, k)`, 0 where an example needs fewer contrasts
    classes : torch.Tensor
        `(B, 1 + k)`, what `Contrasts.classes` returned
    """
    of_known = covariance.diagonal(dim1=1, dim2=2)
    n_known = (classes[:, 1:] != NO_CLASS).sum(1)
    sums = covariance.sum(2)
    trace = of_known.sum(1)
    variance = trace / n_known
    # Of one contrast nobody knows what it shares with another: logits alike share a
    # half.
    n_pairs = n_known * (n_known - 1)
    mean = (sums.sum(1) - trace) / n_pairs.clamp_min(1)
    shared = torch.where(n_pairs > 0, mean, variance / 2)
    # Where it is not between these two, no number of quantities can be alike.
    shared = shared.clamp_min(0).minimum(variance)
    of_sum = variance + (n_known - 1) * shared
    # Where nothing varies, nothing is shared either, and 0 / 0 is 0.
    smallest = torch.finfo(covariance.dtype).tiny
    weight = shared / of_sum.clamp_min(smallest)
    with_known = weight[:, None] * sums

    none = torch.zeros_like(variance)[:, None]
    variances = torch.cat([none, of_known, variance[:, None]], dim=1)
    covariances = pad(covariance, (1, 1, 1, 1))
    covariances[:, -1, 1:-1] = with_known
    covariances[:, 1:-1, -1] = with_known
    covariances[:, -1, -1] = shared
    return AlikeCovariances(variances, covariances)


def columns_of(classes: Tensor, n_outputs: int) -> Tensor:
    """List the columns `(B, 1 + k)` of classes; one more, the last, for no class."""
    return torch.where(classes == NO_CLASS, n_outputs, classes)


def completed(covariance: Tensor, classes: Tensor, n_outputs: int) -> Tensor:
    """Complete contrasts' covariances `(B, k, k)` to `(B, C, C)`.

    What they are is told by `alike`, which takes the same. C is `n_outputs`.
    """
    variances, covariances = alike(covariance, classes)
    n_examples, n_groups = variances.shape

    # Which group each class is of: the last, unless it is listed.
    groups = classes.new_full((n_examples, n_outputs + 1), n_groups - 1)
    in_order = torch.arange(n_groups - 1, device=classes.device)
    columns = columns_of(classes, n_outputs)
    groups = groups.scatter(1, columns, in_order.expand_as(columns))
    groups = groups[:, :n_outputs]

    examples = torch.arange(n_examples, device=classes.device)[:, None, None]
    down = groups[:, :, None]
    across = groups[:, None, :]
    V = covariances[examples, down, across]
    own = variances.gather(1, groups)
    return V.diagonal_scatter(own, dim1=1, dim2=2)
