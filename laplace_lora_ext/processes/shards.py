"""Which examples of a data set a loader gives to this process, and which of them more than once.

Samplers fill up the last round, so that every rank has as many examples. These must not count
twice, and what comes back must be in the data set's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, IterableDatasetShard
from torch.utils.data import BatchSampler, DistributedSampler

from laplace_lora_ext.messages import warn
from laplace_lora_ext.processes.exchange import count, gathered, rank

_ROUND = 2**40  # more than the examples of a batch, or of a rank
_AGAIN = -1
_ROUNDING = 1e-6  # relative: of a sum over the same data in other batches

Places = Callable[[int, int, int], torch.Tensor]
"""Of the number of a batch, of the examples before it, and of its own: their places."""


class Shard:
    """Places, in the order of the whole data, of the examples that a loader gives to this rank.

    Parameters
    ----------
    loader : DataLoader or iterable
        with a `DistributedSampler`, prepared by Accelerate, or any other, whose examples are taken
        to be this rank's own

    Attributes
    ----------
    is_known : bool
        whether the loader says what it leaves to other ranks

    Warns
    -----
    UserWarning
        If Accelerate repeats examples of an iterable data set, and nobody can tell which.
    """

    def __init__(self, loader: Any) -> None:
        places = _places_of(loader)
        self.is_known = loader.is_known if isinstance(loader, Sample) else places is not None
        self._places = places or _own_places
        self._batches = self._examples = 0

    def places(self, n_examples: int) -> torch.Tensor:
        """Of the next batch, `(n_examples,)`; -1 of an example that was given already."""
        result = self._places(self._batches, self._examples, n_examples)
        self._batches, self._examples = self._batches + 1, self._examples + n_examples
        return result


def data_size(loader: Any) -> int | None:
    """Length of a loader's data set, where it has one."""
    data_set = getattr(loader, "dataset", None)
    return len(data_set) if isinstance(data_set, Sized) else None


def total_size(loader: Any, otherwise: int) -> int:
    """Examples that all ranks have together, or another number where a loader does not say."""
    sizes = gathered((data_size(loader), Shard(loader).is_known))
    if any(size is None for size, _ in sizes):
        return otherwise
    known = [size for size, is_known in sizes if is_known]
    return known[0] or 0 if known else sum(size or 0 for size, _ in sizes)


class Sample:
    """A share of a loader's examples, drawn by their places: all ranks draw as one process does.

    Parameters
    ----------
    loader : DataLoader or iterable
    split : callable
        inputs and labels, or None in their place, of a batch
    share : float
        from 0 to 1: the chance of each example
    seed : int
    """

    def __init__(
        self, loader: Iterable[Any], split: Callable[[Any], Any], share: float, seed: int
    ) -> None:
        self._loader, self._split = loader, split
        self._share, self._seed = share, seed
        self.places = torch.empty(0, dtype=torch.long)
        self.is_known = Shard(loader).is_known

    def __iter__(self) -> Iterator[Any]:
        shard = Shard(self._loader)
        for batch in self._loader:
            X, y = self._split(batch)
            places = shard.places(_size(X) if y is None else len(y))
            chosen = is_new(places) & (_uniform(places, self._seed) < self._share)
            self.places = places[chosen]
            if chosen.any():
                X, y = rows((X, y), chosen)
                yield X if y is None else (X, y)


def is_new(places: torch.Tensor) -> torch.Tensor:
    """Whether examples are given for the first time, `(n,)` booleans."""
    return places != _AGAIN


def rows(batch: Any, chosen: torch.Tensor) -> Any:
    """Some examples of a batch, by `(B,)` booleans: of all tensors in it that have B rows."""
    if isinstance(batch, torch.Tensor) and batch.shape[:1] == chosen.shape:
        return batch[chosen.to(batch.device)]
    if isinstance(batch, Mapping):
        return {key: rows(value, chosen) for key, value in batch.items()}
    if isinstance(batch, np.ndarray) and batch.shape[:1] == chosen.shape:
        return batch[chosen.cpu().numpy()]
    if isinstance(batch, list) and len(batch) == len(chosen) and not _has_tensors(batch):
        return [value for value, taken in zip(batch, chosen.tolist(), strict=True) if taken]
    if isinstance(batch, list | tuple):
        return [rows(value, chosen) for value in batch]
    return batch


def _has_tensors(values: list[Any]) -> bool:
    return any(isinstance(value, torch.Tensor | Mapping | np.ndarray) for value in values)


def joined(
    places: torch.Tensor, columns: tuple[torch.Tensor, ...] | None
) -> tuple[torch.Tensor, ...] | None:
    """Tensors with a row for each example of all ranks, in the data's order, each example once.

    Parameters
    ----------
    places : torch.Tensor
        `(n,)`, of this rank's examples
    columns : tuple of torch.Tensor or None
        `(n, ...)` each; None of a rank without data

    Returns
    -------
    tuple of torch.Tensor or None
        None if no rank has data

    Raises
    ------
    ValueError
        If two ranks have the same data.
    """
    if count() == 1 and bool(is_new(places).all()):
        return columns
    parts: Any = gathered((places, columns))
    refuse_copies([(len(own), _total(values)) for own, values in parts])
    parts = [part for part in parts if part[1] is not None]
    if not parts:
        return None
    everywhere = torch.cat([own for own, _ in parts])
    order = everywhere.argsort()
    order = order[is_new(everywhere[order])]
    by_column = zip(*(values for _, values in parts), strict=True)
    return tuple(torch.cat(column)[order.to(column[0].device)] for column in by_column)


def refuse_copies(totals: Sequence[tuple[int, float]]) -> None:
    """Refuse ranks that have the same data, by their number and by a sum over them.

    Raises
    ------
    ValueError
        The message says what loaders to pass.
    """
    seen = sorted((number, total, of_rank) for of_rank, (number, total) in enumerate(totals))
    for (number, total, first), (other_number, other_total, second) in pairwise(seen):
        alike = number == other_number and abs(total - other_total) <= _ROUNDING * abs(total)
        if number and alike:
            raise ValueError(
                f"Ranks {first} and {second} have the same {number} examples: give each rank its "
                "shard, by a DistributedSampler or by accelerator.prepare(loader)."
            )


def _total(columns: Sequence[torch.Tensor] | None) -> float:
    return 0.0 if columns is None else columns[0].double().square().sum().item()


def _size(X: Any) -> int:
    """Number of examples in a batch without labels."""
    return _size(next(iter(X.values()))) if isinstance(X, Mapping) else len(X)


def _uniform(places: torch.Tensor, seed: int) -> torch.Tensor:
    """A number from 0 to 1 for each place, which other places don't change.

    The finalizer of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014); products overflow as they must.
    """
    x = places + torch.full_like(places, seed + 1) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ _shifted(x, shift)) * factor
    return ((x ^ _shifted(x, 31)) & (2**53 - 1)).double() / 2**53


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, as if x had no sign."""
    return (x >> by) & (2 ** (64 - by) - 1)


def _places_of(loader: Any) -> Places | None:
    if isinstance(loader, Sample):
        return lambda *_: loader.places
    sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    if isinstance(loader, DataLoaderDispatcher):
        return _dispatched(loader)
    for shard in (batches, sampler):
        if isinstance(shard, BatchSamplerShard):
            return _split(shard) if shard.split_batches else _in_turn(shard)
    if type(batches) is BatchSampler and isinstance(batches.sampler, DistributedSampler):
        return _strided(batches.sampler)
    data_set = getattr(loader, "dataset", None)
    if isinstance(data_set, IterableDatasetShard) and not data_set.drop_last:
        warn(
            "Accelerate fills up the last batch of an iterable data set with examples that then "
            "count twice: prepare the loader with dispatch_batches=True, or drop_last=True."
        )
    return None


def _own_places(_: int, before: int, size: int) -> torch.Tensor:
    return rank() * _ROUND + before + torch.arange(size)


def _strided(sampler: DistributedSampler) -> Places:
    data_set: Any = sampler.dataset

    def places(_: int, before: int, size: int) -> torch.Tensor:
        result = sampler.rank + sampler.num_replicas * (before + torch.arange(size))
        return result.masked_fill(result >= len(data_set), _AGAIN)

    return places


def _in_turn(shard: BatchSamplerShard) -> Places:
    """Whole batches go to one rank after the other."""
    whole, n_examples = shard.batch_sampler, _length(shard)

    def places(batch: int, _: int, size: int) -> torch.Tensor:
        turn, row = batch * shard.num_processes + shard.process_index, torch.arange(size)
        if shard.batch_size is None:  # batches of many sizes, repeated as they are
            again = torch.full((size,), turn >= len(whole))
            return (turn * _ROUND + row).masked_fill(again, _AGAIN)
        result = turn * shard.batch_size + row
        return result.masked_fill(result >= n_examples, _AGAIN)

    return places


def _split(shard: BatchSamplerShard) -> Places:
    """Each batch is split among the ranks."""
    n_examples = _length(shard)
    whole = shard.batch_size or 0
    own = whole // shard.num_processes

    def places(batch: int, _: int, size: int) -> torch.Tensor:
        result = batch * whole + own * shard.process_index + torch.arange(size)
        return result.masked_fill(result >= n_examples, _AGAIN)

    return places


def _dispatched(loader: Any) -> Places:
    """Rank 0 reads the data and hands them out."""

    def places(batch: int, _: int, size: int) -> torch.Tensor:
        row = loader.state.process_index * size + torch.arange(size)
        is_last = loader.end_of_dataloader
        again = row >= (loader.remainder if is_last else _ROUND)
        return (batch * _ROUND + row).masked_fill(again, _AGAIN)

    return places


def _length(shard: BatchSamplerShard) -> float:
    """Examples that the batches hold before they are filled up."""
    source: Any = getattr(shard.batch_sampler, "sampler", None)
    return len(source) if isinstance(source, Sized) else float("inf")
