"""Gaussian logits under each member of a mixture, and the moments of their mean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from laplace_lora_ext.models.locks import as_tensor
from laplace_lora_ext.predictive.moments import Moments
from laplace_lora_ext.predictive.statistics import PredictiveStatistics


class MixtureMoments(NamedTuple):
    """Gaussian logits of N examples under each member; a mixture takes them in place of a batch."""

    members: tuple[Moments, ...]

    def to(self, *args: object, **kwargs: object) -> MixtureMoments:
        """Convert all as `torch.Tensor.to` does."""
        return MixtureMoments(tuple(moments.to(*args, **kwargs) for moments in self.members))

    def split(self, sizes: int | list[int]) -> Iterator[MixtureMoments]:
        """Consecutive examples in parts of the given sizes, or of one size."""
        parts = zip(*(moments.split(sizes) for moments in self.members), strict=True)
        return (MixtureMoments(part) for part in parts)


@dataclass(eq=False)
class MixtureStatistics:
    """What each member keeps of a data set, to predict it under any prior.

    Attributes
    ----------
    members : tuple of PredictiveStatistics
    priors : tuple of torch.Tensor
        the members' own prior precisions, which a common factor multiplies

    Raises
    ------
    ValueError
        If the members' targets come in other orders.
    """

    members: tuple[PredictiveStatistics, ...]
    priors: tuple[torch.Tensor, ...]

    def __post_init__(self) -> None:
        first, *others = self.members
        if first.targets is None:
            return
        targets = first.targets
        if any(not torch.equal(targets, other.required_targets()) for other in others):
            raise ValueError(
                "Each member passes over the data, and got them in another order: pass a loader "
                "that does not shuffle."
            )

    def moments(self, factor: float | torch.Tensor, scale: Any = None) -> MixtureMoments:
        """Moments with the members' prior precisions multiplied by a factor."""
        pairs = zip(self.members, self.priors, strict=True)
        factor = as_tensor(factor)
        return MixtureMoments(
            tuple(statistics.moments(factor.to(prior) * prior) for statistics, prior in pairs)
        )

    def required_targets(self) -> torch.Tensor:
        """The targets; an error if the data had none."""
        return self.members[0].required_targets()


def mixed(means: torch.Tensor, covariances: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Moments of a mixture of Gaussians `(M, ..., C)`, with variances or covariances."""
    mean = means.mean(0)
    apart = means - mean
    if covariances.ndim == means.ndim:
        return mean, (covariances + apart.square()).mean(0)
    return mean, (covariances + apart[..., :, None] * apart[..., None, :]).mean(0)
