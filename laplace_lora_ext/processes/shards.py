"""Which examples of a data set are held out, and which of them this process passes over.

Samplers for several processes repeat examples, so that all of them get equally many, and sums would
count these twice. So the data of such a loader are dealt anew, each example once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from copy import copy, deepcopy
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard
from torch.utils.data import DataLoader, DistributedSampler, Subset, SubsetRandomSampler

from laplace_lora_ext.processes.exchange import count, gathered, of_first, rank

_OWN = 2**40  # more examples than any rank has
_BATCH_SIZE = 8  # where the loader has batches of many sizes
_ROUNDING = 1e-6  # relative difference of sums over the same data in other batches
_GIVES_ALL = ("torch.utils.data", "accelerate", "transformers")  # samplers: or they draw from all


class Share:
    """The part of a loader's examples that this rank passes over.

    Where a `DistributedSampler` or Accelerate divides the loader's data, rank r of R gets the
    examples r, r + R, ... Any other loader's examples are the rank's own.

    Attributes
    ----------
    loader : iterable of batches
    size : int or None
        how many examples they have, if the loader tells
    is_dealt : bool
        whether all ranks share one data set
    """

    def __init__(self, loader: Any) -> None:
        self.is_dealt = count() > 1 and _is_divided(loader)
        self.loader, self.size = loader, data_size(loader)
        self._parts: list[torch.Tensor] = []
        self._batches = self._examples = 0
        if self.is_dealt:
            examples, size = examples_of(loader), _size_of_batches(loader)
            own = torch.arange(len(examples))[rank() :: count()]
            self.size = len(own)
            self._parts = [part for part in own.split(size) if len(part)]
            indices = [examples[part].tolist() for part in self._parts]
            # Ranks that share one model must all make the same number of passes.
            more = math.ceil(len(examples) / (count() * size)) - len(indices)
            self._parts += [own[:0]] * more
            self.loader = DataLoader(
                loader.dataset,
                batch_sampler=indices + [examples[:1].tolist()] * more,
                num_workers=loader.num_workers,
                collate_fn=loader.collate_fn,
            )

    @classmethod
    def read_once(cls, loader: Any, stride: int = 1) -> Share:
        """A share with its batches in memory: each pass sees the same data in the same order.

        Loaders may shuffle, draw examples or make them at random, and a generator ends. With a
        stride above 1 there is but every second, third... batch.
        """
        share = cls(loader)
        share.loader = copied(islice(share.loader, 0, None, stride))
        share._parts = share._parts[::stride]
        return share

    def places(self, n_examples: int) -> torch.Tensor:
        """Places of the next batch's examples in the whole data; none if it is not to count."""
        number, before = self._batches, self._examples
        self._batches, self._examples = number + 1, before + n_examples
        if not self.is_dealt:
            return rank() * _OWN + before + torch.arange(n_examples)
        part = self._parts[number]
        if len(part) not in (0, n_examples):
            raise ValueError(
                f"The collator made {n_examples} examples of {len(part)}: with several processes, "
                "it must return one for each."
            )
        return part


def copied(batches: Iterable[Any]) -> list[Any]:
    """Batches to keep: a tensor as a worker process sends it would hold a file open."""
    return [deepcopy(batch) for batch in batches]


def data_size(loader: Any) -> int | None:
    """Number of examples in a loader's data set, if it tells.

    One that a loader without a batch sampler reads consists of batches.
    """
    data_set = getattr(loader, "dataset", None)
    has_batches = getattr(loader, "batch_sampler", loader) is None
    return len(data_set) if isinstance(data_set, Sized) and not has_batches else None


def total_size(loader: Any, otherwise: int) -> int:
    """Number of all ranks' examples, or another number if a loader does not tell."""
    sizes = gathered(Share(loader).size)
    return otherwise if None in sizes else sum(size or 0 for size in sizes)


def examples_of(loader: Any) -> torch.Tensor:
    """`(N,)` indices of the examples that a loader gives, in their order in the data set.

    Other examples of the data set may be validation or test data. With several processes, a sampler
    of the user's own is refused by a `ValueError`.
    """
    for sampler in _samplers(loader):
        if isinstance(sampler, SubsetRandomSampler):
            return torch.tensor(sorted(map(int, sampler.indices)), dtype=torch.long)
        if not type(sampler).__module__.startswith(_GIVES_ALL):
            if count() > 1:
                raise ValueError(
                    "With several processes, a sampler of your own hides which examples are used: "
                    "pass a DataLoader of a torch.utils.data.Subset."
                )
            places = {int(place) for each in copy(sampler) for place in np.atleast_1d(each)}
            return torch.tensor(sorted(places), dtype=torch.long)
    return torch.arange(len(loader.dataset))


def check_divisible(loader: DataLoader, held_out: float, parts: int = 1) -> None:
    """Refuse, by a `ValueError`, shares and data of which `divided` can't hold out parts."""
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must be between 0 and 1, not {held_out}.")
    data: Any = getattr(loader, "dataset", None)
    if not isinstance(data, Sized):
        raise ValueError(
            "To hold out examples, their number must be known: pass a DataLoader whose data set "
            "has a length."
        )
    if count() > 1 and not Share(loader).is_dealt:
        raise ValueError(
            "To hold out examples of all ranks, pass a loader with a DistributedSampler, or "
            "accelerator.prepare(loader)."
        )
    n_examples = len(examples_of(loader))
    sizes = _sizes(n_examples, held_out, parts)
    if not 0 < min(sizes) <= max(sizes) < n_examples:
        raise ValueError(f"{n_examples} examples are too few to hold out a share of {held_out:g}.")


def divided(
    loader: DataLoader,
    held_out: float,
    groups: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    parts: int = 1,
) -> Iterator[tuple[Any, Any]]:
    """Divisions of a loader's examples, each holding out others; all in the data's order.

    Yields pairs of the rest and a share of the examples, both as `chosen` makes them. Examples that
    the loader's sampler leaves out are not used. Without a generator, every call holds out the
    same. Groups `(N,)` of the examples, such as their classes, are each held out in proportion, and
    never to the last example: with many groups of one example, fewer are held out. Refuses what
    `check_divisible` does.
    """
    check_divisible(loader, held_out, parts)
    data, places = loader.dataset, examples_of(loader)
    groups = torch.zeros(len(places), dtype=torch.long) if groups is None else groups
    _, numbers, sizes = groups.unique(return_inverse=True, return_counts=True)
    waiting = of_first(_mixed(numbers, generator or torch.Generator().manual_seed(0))).tolist()
    for size in _sizes(len(places), held_out, parts):
        left, held, later = sizes.tolist(), [], []
        for example in waiting:
            group = int(numbers[example])
            if len(held) < size and left[group] > 1:
                left[group] -= 1
                held.append(example)
            else:
                later.append(example)
        waiting = later
        if not held:
            raise ValueError(
                f"No class has examples enough, among {len(places)}, to hold out one and learn "
                "from another."
            )
        rest = sorted(set(range(len(places))) - set(held))
        yield chosen(data, places[rest].tolist()), chosen(data, places[held].tolist())


def _sizes(n_examples: int, held_out: float, parts: int) -> list[int]:
    """How many examples each part holds out."""
    ends = [round(n * held_out * n_examples) for n in range(parts + 1)]
    return [end - start for start, end in pairwise(ends)]


def _mixed(groups: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A random order of examples in which every stretch has its share of each group.

    Systematic sampling: a group's k-th of m examples is at (k + u) / m of the order, where u is
    random and the same for the whole group.
    """
    order = torch.randperm(len(groups), generator=generator)
    groups = groups[order]
    sizes = groups.bincount()
    by_group = groups.argsort(stable=True)
    number = torch.empty_like(groups)
    number[by_group] = torch.arange(len(groups)) - (sizes.cumsum(0) - sizes)[groups[by_group]]
    start = torch.rand(len(sizes), generator=generator, dtype=torch.float64)
    return order[((number + start[groups]) / sizes[groups]).argsort(stable=True)]


def taken(loader: DataLoader) -> Any:
    """A loader's data set, without examples that its sampler leaves out."""
    data: Any = loader.dataset
    places = examples_of(loader)
    return data if len(places) == len(data) else chosen(data, places.tolist())


def chosen(data: Any, places: list[int]) -> Any:
    """Some examples of a data set; trainers know columns only of a `datasets.Dataset`."""
    places = sorted(places)
    return data.select(places) if hasattr(data, "select") else Subset(data, places)


def in_order(
    examples: Any, batch_size: int | None, collate_fn: Callable[[Any], Any] | None = None
) -> DataLoader:
    """Batches of a data set, each example once and in order, which all processes share."""
    sampler = DistributedSampler(examples, shuffle=False) if count() > 1 else None
    return DataLoader(examples, batch_size=batch_size, sampler=sampler, collate_fn=collate_fn)


def in_order_like(loader: DataLoader, examples: Any) -> DataLoader:
    """Batches of examples as a loader makes them, but each example once and in order."""
    makes_batches = loader.batch_sampler is not None  # else the data set does
    batch_size = loader.batch_size or (_BATCH_SIZE if makes_batches else None)
    return in_order(examples, batch_size, loader.collate_fn)


def joined(
    places: torch.Tensor, columns: tuple[torch.Tensor, ...] | None
) -> tuple[torch.Tensor, ...] | None:
    """Join the ranks' tensors: one row for each example, in the data's order.

    Takes the places `(n,)` of this rank's examples, and columns `(n, ...)`, None on a rank without
    data; None if no rank has data. Ranks with the same data, or of which only some have labels, are
    refused by a `ValueError`.
    """
    if count() == 1:
        return columns
    of_ranks: Any = gathered((places, columns))
    if any((own >= _OWN).any() for own, _ in of_ranks):  # dealt examples are never copies
        squares = [
            found[0].double().square().sum().item() if found else 0.0 for _, found in of_ranks
        ]
        refuse_copies([(len(own), sq) for (own, _), sq in zip(of_ranks, squares, strict=True)])
    parts = [part for part in of_ranks if part[1] is not None]
    if not parts:
        return None
    order = torch.cat([own for own, _ in parts]).argsort()
    return tuple(column[order.to(column.device)] for column in stacked([v for _, v in parts]))


def stacked(parts: Iterable[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """Join batches' columns; batches of which only some have labels are refused."""
    parts = list(parts)
    if len({len(columns) for columns in parts}) > 1:
        raise ValueError("Some batches have labels and others have none: give all or none labels.")
    return tuple(map(torch.cat, zip(*parts, strict=True)))


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


def _samplers(loader: Any) -> Iterator[Any]:
    """A loader's samplers, and those within them."""
    for name in ("batch_sampler", "sampler"):
        sampler = getattr(loader, name, None)
        if sampler is not None:
            yield sampler
            yield from _samplers(sampler)


def _is_divided(loader: Any) -> bool:
    """Whether the examples of a loader's data set are divided among the ranks."""
    streams = isinstance(getattr(loader, "dataset", None), IterableDatasetShard)
    if streams or isinstance(loader, DataLoaderDispatcher):
        raise ValueError(
            "Accelerate repeats examples where it shards an iterable data set or dispatches "
            "batches, and they would count twice: give each rank a loader of its own, without "
            "accelerator.prepare."
        )
    for sampler in _samplers(loader):  # torch's and Accelerate's names
        number = getattr(sampler, "num_replicas", getattr(sampler, "num_processes", None))
        if number not in (None, count()):
            raise ValueError(
                f"The loader divides its data among {number} processes, and there are {count()}."
            )
        if number is not None:
            return True
    return False


def _size_of_batches(loader: Any) -> int:
    """Of one rank."""
    batches = loader.batch_sampler
    size = getattr(batches, "batch_size", None) or loader.batch_size or _BATCH_SIZE
    return max(1, size // count()) if getattr(batches, "split_batches", False) else size
