"""Gaussian logits of a data set under any prior precision, with few passes through the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.predictive.data_sets import over_loader
from laplace_lora_ext.predictive.glm import predictive_distribution
from laplace_lora_ext.predictive.moments import Moments
from laplace_lora_ext.predictive.statistics import PredictiveStatistics
from laplace_lora_ext.processes.exchange import count, rank
from laplace_lora_ext.processes.shards import (
    Share,
    chosen,
    data_size,
    examples_of,
    in_order_like,
    total_size,
)

Data = Iterable[Any] | PredictiveStatistics


def some_of(data: Data, max_examples: int, n_data: int, seed: int) -> Data:
    """The data, or that many of them, drawn at random; of an iterable about as many, in batches.

    `n_data` is the number of examples where the data don't tell.
    """
    if isinstance(data, PredictiveStatistics):
        return data
    loader: Any = data
    chance = max_examples / max(1, total_size(loader, n_data))
    if data_size(loader) is None or (count() > 1 and not Share(loader).is_dealt):
        return data if chance >= 1 else _SomeBatches(data, chance, seed + rank())
    examples = examples_of(loader)
    if len(examples) <= max_examples:
        return data
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed))
    some = examples[order[:max_examples]].tolist()
    return in_order_like(loader, chosen(loader.dataset, some))


@dataclass
class _SomeBatches:
    """The same batches of an iterable each time, each with a chance of being among them."""

    data: Iterable[Any]
    chance: float
    seed: int

    def __iter__(self) -> Iterator[Any]:
        draw = torch.Generator().manual_seed(self.seed)
        return (batch for batch in self.data if torch.rand((), generator=draw) < self.chance)


def moments_along(
    la: Posterior, data: Data, progress_bar: bool
) -> Callable[[torch.Tensor], Moments]:
    """A function from a prior precision to the data's moments.

    With "lowrank_kron" the data pass through the model once, or not at all if they are statistics;
    with other structures at every prior precision, which `la` is left with.
    """
    loader: Any = data
    statistics: PredictiveStatistics | None = la.statistics_of(loader, progress_bar)
    if statistics is not None:
        return statistics.moments

    def of_batches(prior_precision: torch.Tensor) -> Moments:
        la.prior_precision = prior_precision
        return Moments(
            *over_loader(loader, lambda batch: predictive_distribution(la, la.model.inputs(batch)))
        )

    return of_batches
