"""SWAG: a Gaussian of the weights that the tail of a training goes through."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from benchmarks.methods.method import Members
from benchmarks.methods.sampled import sampled
from benchmarks.models import AdaptedModel
from benchmarks.training import Hyperparameters, Recipe, Weights


class SWAG(Recipe):
    """A training that ends at a constant rate (Maddox et al., NeurIPS 2019).

    The learning rate falls as the paper's does, to a share of its first value, stays
    there for the tail, and iterates at equal distances of the tail are kept. Over LoRA
    weights: Onal et al., arXiv:2405.03425. Twenty held-out texts have chosen rate and
    tail.
    """

    def __init__(
        self, rate: float = 1.0, tail: float = 0.5, iterates: int = 20
    ) -> None:
        self.rate = rate  # share of the learning rate
        self.tail = tail  # share of the steps
        self.iterates = iterates
        self.name = f"SWAG, {iterates} iterates, tail {tail:g}, rate {rate:g}"

    def schedule(self, optimizer: Any, settings: Hyperparameters) -> Any:
        """Make the schedule: it warms up, falls, and is constant for the tail."""
        return LambdaLR(optimizer, partial(self.pace, settings=settings))

    def pace(self, steps_done: int, settings: Hyperparameters) -> float:
        """Return the share of the learning rate with which the next step is taken."""
        warmup = settings.warmup_steps
        if steps_done < warmup:
            return steps_done / warmup
        # Warming up may last until the tail begins, where few steps are asked for.
        n_falling = max(1, self._before_tail(settings) - warmup)
        fallen = (steps_done - warmup) / n_falling
        share_fallen = min(1.0, fallen)
        return 1 - share_fallen * (1 - self.rate)

    def kept_steps(self, settings: Hyperparameters) -> list[int]:
        """List the steps of the iterates."""
        first = self._before_tail(settings)
        tail = settings.steps - first
        count = min(self.iterates, tail)
        return [first + tail * number // count for number in range(1, count + 1)]

    def _before_tail(self, settings: Hyperparameters) -> int:
        """Count the steps before the tail, which has two at least.

        One iterate has no deviations.
        """
        before = round((1 - self.tail) * settings.steps)
        return min(before, settings.steps - 2)


@dataclass(frozen=True)
class Iterates:
    """The Gaussian of iterates, with a covariance half diagonal and half low-rank."""

    mean: Weights
    deviations: Weights  # of each iterate from the mean, (iterates, *shape)

    @classmethod
    def of(cls, iterates: Sequence[Weights]) -> "Iterates":
        """Compute mean and deviations.

        All iterates are in memory, so that deviations are from the mean of all, and not
        from that of the iterates so far.
        """
        means = {}
        deviations = {}
        for name in iterates[0]:
            of_weight = torch.stack([weights[name] for weights in iterates])
            mean = of_weight.mean(0)
            means[name] = mean
            deviations[name] = of_weight - mean
        return cls(means, deviations)

    def __call__(self, generator: torch.Generator) -> Weights:
        """Draw how far all weights are from the mean."""
        some_weight = next(iter(self.deviations.values()))
        count = len(some_weight)
        # Two covariances share the whole, hence the roots of 2.
        divisor = math.sqrt(2 * (count - 1))
        # The same numbers for all weights, which thus vary together.
        shared = torch.randn(count, generator=generator) / divisor
        drawn = {}
        for name, deviations in self.deviations.items():
            own = torch.randn(deviations.shape[1:], generator=generator)
            variance = deviations.square().mean(0)
            spread = variance.sqrt()
            diagonal = spread * own.to(spread) / math.sqrt(2)
            together = torch.tensordot(shared.to(deviations), deviations, dims=1)
            drawn[name] = diagonal + together
        return drawn


def of_iterates(recipe: Recipe, model: AdaptedModel, _: DataLoader) -> Members:
    """Train again, and draw from the Gaussian of the checkpoints.

    Training has the same start and the same texts.
    """
    assert model.retrained is not None
    other = model.retrained(recipe)
    iterates = list(other.checkpoints.values())
    noise = Iterates.of(iterates)
    last = max(other.checkpoints)
    # As if training had ended at the mean: draws are around the weights that it has.
    averaged = replace(other, checkpoints={last: noise.mean})
    return sampled(averaged.at(last), noise)
