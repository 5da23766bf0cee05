"""Gaussian logits of a data set under any prior precision, with few passes through the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from laplace_lora_ext.models.batches import named_batches
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.predictive.moments import Moments
from laplace_lora_ext.predictive.statistics import PredictiveStatistics
from laplace_lora_ext.processes.shards import Sample, Shard, joined, total_size

Data = Iterable[Any] | PredictiveStatistics


def some_of(la: Posterior, data: Data, max_examples: int, seed: int) -> Data:
    """The data, or about so many of them, drawn at random."""
    if isinstance(data, PredictiveStatistics):
        return data
    share = max_examples / max(1, total_size(data, la.n_data))
    return data if share >= 1 else Sample(data, la.model.split_if_labelled, share, seed)


def moments_along(
    la: Posterior, data: Data, rows: Callable[[int], int], progress_bar: bool
) -> Callable[[torch.Tensor], Iterable[Moments]]:
    """A function from a prior precision to the data's moments, in parts.

    Parameters
    ----------
    la : Posterior
        with "lowrank_kron" the data pass through the model once, or not at all if they are
        statistics; with other structures at every prior precision, which `la` is left with
    data : DataLoader, iterable or PredictiveStatistics
    rows : callable
        from the number of outputs to the number of examples in a part
    progress_bar : bool
    """
    statistics: PredictiveStatistics | None = la.statistics_of(data, progress_bar)
    if statistics is not None:
        size = rows(statistics.f_mu.shape[1])
        parts = [statistics[i : i + size] for i in range(0, len(statistics), size)]
        return lambda prior_precision: (part.moments(prior_precision) for part in parts)

    def of_batches(prior_precision: torch.Tensor) -> Iterable[Moments]:
        la.prior_precision = prior_precision
        parts, places, shard = [], [torch.empty(0, dtype=torch.long)], Shard(data)
        for _, batch in named_batches(data):  # pyright: ignore[reportArgumentType]
            X, _ = la.model.split_if_labelled(batch)
            parts.append(la.predictive_moments(X).to("cpu"))
            places.append(shard.places(len(parts[-1].f_mu)))
        columns = tuple(torch.cat(column) for column in zip(*parts, strict=True)) or None
        columns = joined(torch.cat(places), columns)
        return [] if columns is None else Moments(*columns).split(rows(columns[0].shape[1]))

    return of_batches
