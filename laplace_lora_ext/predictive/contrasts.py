"""Contrasts: how far other logits are from the most probable one, as many as matter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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


def completed(
    covariance: Tensor,
    classes: Tensor,
    n_outputs: int,
) -> Tensor:
    """Complete contrasts' covariances `(B, k, k)` to those of all C classes.

    Row and column of the most probable class are 0. So the matrices differ from those
    of the logits, but say the same of every difference of two that is known.

    The others are taken to be like the known ones: their variance is the mean of the
    known variances, and the covariance of two of them the mean of the known
    covariances. Their covariance with the known ones is that of one of several
    quantities that are all alike, predicted from the others by their sum. Nothing of
    this makes a negative eigenvalue.

    Parameters
    ----------
    covariance : torch.Tensor
        `(B, k, k)`, 0 where an example needs fewer contrasts
    classes : torch.Tensor
        `(B, 1 + k)`, what `Contrasts.classes` returned
    n_outputs : int
        C
    """
    n_examples, n_places, _ = covariance.shape
    n_known = (classes[:, 1:] != NO_CLASS).sum(1)
    sums = covariance.sum(2)
    trace = covariance.diagonal(dim1=1, dim2=2).sum(1)
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

    # Rows of what is known, of a class that is not, and of the most probable one.
    other = n_places
    first = n_places + 1
    table = covariance.new_zeros(n_examples, n_places + 2, n_places + 2)
    table[:, :n_places, :n_places] = covariance
    table[:, other, :n_places] = with_known
    table[:, :n_places, other] = with_known
    table[:, other, other] = shared

    # Which of these rows is each class's; in a last column stands what belongs to none.
    rows = classes.new_full((n_examples, n_outputs + 1), other)
    in_order = torch.arange(n_places + 1, device=classes.device) - 1
    in_order[0] = first
    columns = torch.where(classes == NO_CLASS, n_outputs, classes)
    rows = rows.scatter(1, columns, in_order.expand_as(columns))
    rows = rows[:, :n_outputs]

    examples = torch.arange(n_examples, device=classes.device)[:, None, None]
    down = rows[:, :, None]
    across = rows[:, None, :]
    V = table[examples, down, across]
    # All that are not known have one row: what each of them has alone is on the
    # diagonal.
    alone = variance - shared
    own = torch.where(rows == other, alone[:, None], 0)
    return V + torch.diag_embed(own)
