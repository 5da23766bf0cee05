"""Which examples of a data set a loader gives to this process, and which of them twice.

Samplers repeat examples to give every rank equally many. Repetitions must not count, and results
must come back in the data set's order.
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

_ROUND = 2**40  # more examples than any batch or rank has
_AGAIN = -1
_ROUNDING = 1e-6  # relative difference of sums over the same data in other batches

Places = Callable[[int, int, int], torch.Tensor]
"""Takes a batch's number, how many examples came before it and how many it has: their places."""


class Shard:
    """Where the examples that a loader gives to this rank stand in the whole data set.

    Parameters
    ----------
    loader : DataLoader or iterable
        with a `DistributedSampler`, prepared by Accelerate, or any other. Examples of another
        loader count as this rank's own

    Attributes
    ----------
    is_known : bool
        whether the loader shows which examples other ranks get

    Warns
    -----
    UserWarning
        If Accelerate repeats examples of an iterable data set without telling which.
    """

    def __init__(self, loader: Any) -> None:
        places = _places_of(loader)
        self.is_known = loader.is_known if isinstance(loader, Sample) else places is not None
        self._places = places or _own_places
        self._batches = self._examples = 0

    def places(self, n_examples: int) -> torch.Tensor:
        """Places of the next batch's examples, `(n_examples,)`; -1 for a repeated example."""
        result = self._places(self._batches, self._examples, n_examples)
        self._batches, self._examples = self._batches + 1, self._examples + n_examples
        return result


def data_size(loader: Any) -> int | None:
    """Number of examples in a loader's data set, if it tells.

    One that a loader without a batch sampler reads consists of batches.
    """
    data_set = getattr(loader, "dataset", None)
    has_batches = getattr(loader, "batch_sampler", loader) is None
    return len(data_set) if isinstance(data_set, Sized) and not has_batches else None


def total_size(loader: Any, otherwise: int) -> int:
    """Number of all ranks' examples, or another number if a loader does not tell."""
    sizes = gathered((data_size(loader), Shard(loader).is_known))
    if any(size is None for size, _ in sizes):
        return otherwise
    known = [size for size, is_known in sizes if is_known]
    return known[0] or 0 if known else sum(size or 0 for size, _ in sizes)


class Sample:
    """A random share of a loader's examples: all ranks together draw what one process would.

    Parameters
    ----------
    loader : DataLoader or iterable
    split : callable
        splits a batch into inputs and labels; the labels may be None
    share : float
        the chance of each example, from 0 to 1
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
    """Whether examples come for the first time, `(n,)` booleans."""
    return places != _AGAIN


def rows(batch: Any, chosen: torch.Tensor) -> Any:
    """Some examples of a batch, chosen by `(B,)` booleans: rows of all tensors with B rows."""
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
    """Join the ranks' tensors: one row for each example, in the data's order, without repetitions.

    Parameters
    ----------
    places : torch.Tensor
        `(n,)`, places of this rank's examples
    columns : tuple of torch.Tensor or None
        `(n, ...)` each; None on a rank without data

    Returns
    -------
    tuple of torch.Tensor or None
        None if no rank has data; two ranks with the same data are refused
    """
    if count() == 1 and bool(is_new(places).all() and (places.diff() > 0).all()):
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
    """Refuse ranks with the same data: as many examples, and the same sum over them."""
    seen = sorted((number, total, of_rank) for of_rank, (number, total) in enumerate(totals))
    for (number, total, first), (other_number, other_total, second) in pairwise(seen):
        alike = number == other_number and abs(total - other_total) <= _ROUNDING * abs(total)
        if number and alike:
            raise ValueError(
                f"Ranks {first} and {second} have the same {number} examples: give each rank its "
                "own shard, with a DistributedSampler or accelerator.prepare(loader)."
            )


def _total(columns: Sequence[torch.Tensor] | None) -> float:
    return 0.0 if columns is None else columns[0].double().square().sum().item()


def _size(X: Any) -> int:
    """Number of examples in a batch without labels."""
    return _size(next(iter(X.values()))) if isinstance(X, Mapping) else len(X)


def _uniform(places: torch.Tensor, seed: int) -> torch.Tensor:
    """A number from 0 to 1 for each place, whatever the other places are.

    The finalizer of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014); products overflow as intended.
    """
    x = places + torch.full_like(places, seed + 1) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ _shifted(x, shift)) * factor
    return ((x ^ _shifted(x, 31)) & (2**53 - 1)).double() / 2**53


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right as if x were unsigned."""
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
            "Accelerate fills the last batch of an iterable data set with repeated examples, which "
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
    """Ranks take turns, a whole batch each."""
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
    """The ranks share each batch."""
    n_examples = _length(shard)
    whole = shard.batch_size or 0
    own = whole // shard.num_processes

    def places(batch: int, _: int, size: int) -> torch.Tensor:
        result = batch * whole + own * shard.process_index + torch.arange(size)
        return result.masked_fill(result >= n_examples, _AGAIN)

    return places


def _dispatched(loader: Any) -> Places:
    """Rank 0 reads the data and sends each rank its part."""

    def places(batch: int, _: int, size: int) -> torch.Tensor:
        row = loader.state.process_index * size + torch.arange(size)
        is_last = loader.end_of_dataloader
        again = row >= (loader.remainder if is_last else _ROUND)
        return (batch * _ROUND + row).masked_fill(again, _AGAIN)

    return places


def _length(shard: BatchSamplerShard) -> float:
    """Examples in the batches, without repetitions."""
    source: Any = getattr(shard.batch_sampler, "sampler", None)
    return len(source) if isinstance(source, Sized) else float("inf")
