"""Which examples of a data set this process reads, and which are held out.

Samplers for several processes repeat examples, so that all of them get equally many,
and sums would count these twice. So the data of such a loader are dealt anew, each
example once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from copy import copy, deepcopy
from inspect import signature
from itertools import pairwise
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
import tqdm
from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset

from laplace_lora_ext.processes import count, gathered, of_first, rank

Columns = tuple[Tensor, ...]
"""Tensors with a row for each example."""

_OWN = 2**40  # more examples than any rank has
_FEW = 8  # examples of which a draw may be in order by chance
_BATCH_SIZE = 8  # where the loader has batches of many sizes
_GENERATORS = random.Random, np.random.Generator, np.random.RandomState, torch.Generator
# What a `DataLoader` is given apart from which examples it reads.
_OF_LOADING = signature(DataLoader).parameters.keys() - {
    *("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"),
    "generator",  # another loader's draws would change the numbers of this one
}


class Share:
    """The part of a loader's examples that this rank passes over.

    Where a `DistributedSampler` or Accelerate divides the loader's data, rank r of R
    gets the examples r, r + R, ... Any other loader's examples are the rank's own.

    Attributes
    ----------
    loader : iterable of batches
    size : int or None
        how many examples they have, if the loader tells
    is_dealt : bool
        whether all ranks share one data set
    """

    def __init__(self, loader: Any) -> None:
        # First, since it refuses streams by name that have a length in vain.
        self.is_dealt = count() > 1 and _is_divided(loader)
        self.loader = loader
        self.size = data_size(loader)
        self._dealt_indices: list[Tensor] = []  # of each batch's examples
        self._n_batches = 0  # that `take_indices` was asked for
        self._n_rows = 0
        self._inputs = 0  # a sum over all rows so far
        if self.is_dealt:
            self._deal(loader)

    def _deal(self, loader: DataLoader) -> None:
        """Deal this rank its examples, each once, in place of a sampler's."""
        examples = examples_of(loader)
        batch_size = _size_of_batches(loader)
        own = torch.arange(len(examples))[rank() :: count()]
        batches = [batch for batch in own.split(batch_size) if len(batch)]
        # Ranks that share one model must all make the same number of passes: a rank
        # that has fewer batches passes over the first example again, which then counts
        # nowhere.
        most_batches = math.ceil(len(examples) / (count() * batch_size))
        n_idle = most_batches - len(batches)
        indices = [examples[batch].tolist() for batch in batches]
        indices += [examples[:1].tolist()] * n_idle
        self.size = len(own)
        self._dealt_indices = batches + [own[:0]] * n_idle
        self.loader = DataLoader(
            loader.dataset, batch_sampler=indices, **_options(loader)
        )

    @classmethod
    def read_once(cls, loader: Any) -> Share:
        """Read the share's batches into memory, so that all passes see the same.

        Loaders may shuffle, draw examples or make them at random, and a generator ends.
        """
        share = cls(loader)
        # Copies: tensors of worker processes hold files open.
        share.loader = [deepcopy(batch) for batch in share.loader]
        return share

    def take_indices(self, n_rows: int, owners: Tensor | None = None) -> Tensor:
        """Take the indices, in the whole data, of the next batch's rows that count.

        Each call moves on by a batch. A row is an example, unless `owners` `(n_rows,)`
        say which of the batch's examples each is of, as of texts whose tokens have
        rows. An example's rows share its index.
        """
        batch, first = self._n_batches, self._n_rows
        self._n_batches += 1
        self._n_rows += n_rows
        if not self.is_dealt:
            # Data of a rank's own come after those of the ranks before it.
            return rank() * _OWN + first + torch.arange(n_rows)
        indices = self._dealt_indices[batch]
        if not len(indices):
            return indices[:0]
        if owners is not None:
            return indices[owners.cpu()]
        if n_rows != len(indices):
            raise ValueError(
                f"The collator did not make {len(indices)} examples of {len(indices)}: "
                "with several processes, it must return one for each."
            )
        return indices

    def batches(
        self, description: str, progress_bar: bool
    ) -> Iterator[tuple[str, Any]]:
        """Pass over the share: yield each batch, with its name for error messages."""
        shows_bar = progress_bar and rank() == 0
        bar = tqdm.tqdm(self.loader, desc=description, disable=not shows_bar)
        for index, batch in enumerate(bar):
            if count() > 1 and not self.is_dealt:  # for `refuse_copies`
                self._inputs += sum(map(sum, _checksums(batch)))
            yield f"batch {index}", batch

    def refuse_copies(self) -> None:
        """Refuse ranks that were given the same data; dealt ones are never copies."""
        own = None if self.is_dealt else (self._n_rows, self._inputs)
        first = gathered(own).index(own)
        if own and self._n_rows and first != rank():
            raise ValueError(
                f"Ranks {first} and {rank()} have the same {self._n_rows} examples: "
                "give each rank its own shard, with a DistributedSampler or "
                "accelerator.prepare(loader)."
            )


def _checksums(value: Any, mask: Any = None) -> list[list[int]]:
    """List checksums of the rows of each tensor in a batch, without their padding.

    What is no tensor has one.
    """
    if isinstance(value, Mapping):
        mask, value = value.get("attention_mask"), list(value.values())
    if isinstance(value, list | tuple):
        return [of_rows for part in value for of_rows in _checksums(part, mask)]
    if not isinstance(value, Tensor) or not value.ndim:
        return [[crc32(repr(value).encode())]]
    rows: Any = value.detach().cpu().double()  # NumPy has no bfloat16
    if mask is not None and value.shape[: mask.ndim] == mask.shape:
        rows = [row[own.bool()] for row, own in zip(rows, mask.cpu(), strict=True)]
    return [[crc32(row.numpy().tobytes()) for row in rows]]


def contents_of(inputs: Any, n_examples: int) -> Tensor:
    """Number examples `(B,)` by what they hold, copies alike; 0 where nothing tells."""
    numbers = torch.zeros(n_examples, dtype=torch.long)
    for of_rows in _checksums(inputs):
        if len(of_rows) == n_examples:
            numbers += torch.tensor(of_rows)
    return numbers


def data_size(loader: Any) -> int | None:
    """Count the examples of a loader's data set, if it tells.

    One that a loader without a batch sampler reads consists of batches.
    """
    data_set = getattr(loader, "dataset", None)
    consists_of_batches = getattr(loader, "batch_sampler", loader) is None
    if consists_of_batches or not isinstance(data_set, Sized):
        return None
    return len(data_set)


def examples_of(loader: Any) -> Tensor:
    """Return the indices `(N,)` of the examples that a pass over a loader gives.

    They are sorted, each is there once, and those that `drop_last` would drop are among
    them. Other examples of the data set may be validation or test data. A loader that
    draws gives the same ones in every call. Of draws with replacement they are all that
    can be drawn.
    """
    for sampler in _samplers(loader):
        if getattr(sampler, "replacement", False):
            everything = torch.ones(len(loader.dataset), device="cpu")
            return getattr(sampler, "weights", everything).cpu().nonzero().flatten()
    examples = torch.tensor(sorted(set(_indices(loader))), dtype=torch.long)
    # Ranks may draw others, where a sampler has a generator of its own kind.
    return of_first(examples) if count() > 1 and _is_divided(loader) else examples


def check_in_order(loader: Any) -> None:
    """Refuse a loader that gives a data set's examples in another order.

    What it is told of them is by their places.
    """
    is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
    if is_stream or next(_samplers(loader), None) is None:
        return
    # Of few examples, some draws are in order by chance.
    draws = 1 if len(loader.dataset) > _FEW else _FEW
    orders = [_indices(loader, seed) for seed in range(draws)]
    if any(later < earlier for order in orders for earlier, later in pairwise(order)):
        raise ValueError(
            "Predictions are told from each other by their places, and this loader "
            "shuffles, or sorts, its data set: pass one with shuffle=False, or the "
            "data set itself with its collate_fn."
        )


def _indices(loader: Any, seed: int = 0) -> list[int]:
    """List the indices that a loader's own sampler gives in one pass, of all ranks."""
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            "A stream's examples can't be chosen by their places: pass a data set with "
            "__getitem__ and a length."
        )
    sampler = next(_samplers(loader), None)
    if sampler is None:
        return list(range(len(loader.dataset)))
    # It draws the same in every call, and leaves torch's state as it was.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        # It gives examples, or lists of them.
        batches = [np.ravel(batch).tolist() for batch in _of_all_ranks(sampler)]
    return [int(index) for batch in batches for index in batch]


def _of_all_ranks(sampler: Any) -> Any:
    """Copy a sampler, with those within it, to one that gives all ranks' examples."""
    if not hasattr(sampler, "__dict__"):
        return sampler
    sampler = copy(sampler)
    own = vars(sampler)
    for name, value in own.items():
        if name in ("batch_sampler", "sampler"):
            own[name] = _of_all_ranks(value)
        elif isinstance(value, _GENERATORS):
            own[name] = deepcopy(value)
    if "drop_last" in own:  # shuffled, other examples would be left out next time
        own.update(drop_last=False)
    if "num_replicas" in own:  # torch's word
        n_examples = len(sampler.dataset)
        own.update(num_replicas=1, rank=0)
        own.update(num_samples=n_examples, total_size=n_examples)
    if "num_processes" in own:  # Accelerate's
        own.update(num_processes=1, process_index=0)
    return sampler


def check_divisible(loader: DataLoader, held_out: float) -> None:
    """Refuse shares and data that `divide` can't divide (`ValueError`)."""
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must be between 0 and 1, not {held_out}.")
    if not isinstance(getattr(loader, "dataset", None), Sized):
        raise ValueError(
            "To hold out examples, their number must be known: pass a DataLoader whose "
            "data set has a length."
        )
    if count() > 1 and not Share(loader).is_dealt:
        raise ValueError(
            "To hold out examples of all ranks, pass a loader with a "
            "DistributedSampler, or accelerator.prepare(loader)."
        )
    n_examples = len(examples_of(loader))
    if round(held_out * n_examples) in (0, n_examples):
        raise ValueError(
            f"{n_examples} examples are too few to hold out a share of {held_out:g}."
        )


class Division(NamedTuple):
    """A data set without some examples, these, and their indices in it, in order."""

    rest: Any
    held: Any
    indices: list[int]


def divide(
    loader: DataLoader,
    held_out: float,
    groups: Tensor,
    contents: Tensor,
    generator: torch.Generator | None = None,
) -> Division:
    """Divide a loader's examples, holding out some of them.

    Both parts are as `select_examples` makes them. Examples that the loader's sampler
    leaves out are not used. Without a generator, every call holds out the same. Groups
    `(N,)` of the examples, such as their classes, are each held out in proportion, and
    never to the last example: with many groups of one example, fewer are held out.
    Copies, which have the same number in `contents` `(N,)`, are held out together, by
    the first one's group. Call `check_divisible` first.
    """
    data = loader.dataset
    indices = examples_of(loader)
    first_with: dict[int, int] = {}
    first_copy = [
        first_with.setdefault(content, example)
        for example, content in enumerate(contents.tolist())
    ]
    distinct = list(first_with.values())
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    numbers = groups[distinct].unique(return_inverse=True)[1]
    order = of_first(_mixed(numbers, generator)).tolist()
    group_of = numbers.tolist()
    # The last example of each group stays, for the rest to learn from.
    last = {group_of[example]: example for example in order}
    held = [example for example in order if last[group_of[example]] != example]
    held = held[: round(held_out * len(distinct))]
    if not held:
        raise ValueError(
            f"No class has examples enough, among {len(distinct)} distinct ones, to "
            "hold out one and learn from another."
        )
    chosen = {distinct[example] for example in held}
    is_held = torch.tensor([first in chosen for first in first_copy])
    indices_held = indices[is_held].tolist()
    to_learn = select_examples(data, indices[~is_held].tolist())
    return Division(to_learn, select_examples(data, indices_held), indices_held)


def _mixed(groups: Tensor, generator: torch.Generator) -> Tensor:
    """Order examples at random, so that every stretch has its share of each group.

    Systematic sampling: a group's k-th of m examples is at (k + u) / m of the order,
    where u is random and the same for the whole group.
    """
    at_random = torch.randperm(len(groups), generator=generator)
    shuffled = groups[at_random]
    n_groups = int(groups.max()) + 1
    offsets = torch.rand(n_groups, generator=generator, dtype=torch.float64)
    position = torch.empty(len(groups), dtype=torch.float64)
    for group, u in enumerate(offsets):
        own = at_random[shuffled == group]
        position[own] = (torch.arange(len(own)) + u) / len(own)
    return position.argsort()


def own_examples(loader: DataLoader) -> Any:
    """Return a loader's data set, without examples that its sampler leaves out."""
    indices = examples_of(loader)
    data = loader.dataset
    is_whole = isinstance(data, Sized) and len(indices) == len(data)
    return data if is_whole else select_examples(data, indices.tolist())


def select_examples(data: Any, indices: list[int]) -> Any:
    """Select some examples of a data set, in its order."""
    indices = sorted(indices)
    # Trainers know columns only of a `datasets.Dataset`, which `select` keeps one.
    return data.select(indices) if hasattr(data, "select") else Subset(data, indices)


def in_order(examples: Any, batch_size: int | None, **options: Any) -> DataLoader:
    """Load a data set, each example once and in order, which all processes share.

    Options are those of a `DataLoader`.
    """
    # By its sampler a `Share` knows that the data are to be dealt.
    sampler = DistributedSampler(examples, shuffle=False) if count() > 1 else None
    return DataLoader(examples, batch_size, sampler=sampler, **options)


def in_order_like(
    loader: DataLoader, examples: Any, batch_size: int | None = None
) -> DataLoader:
    """Load examples as a loader does its own, but each once and in order."""
    if batch_size is None and loader.batch_sampler is not None:
        batch_size = _size_of_batches(loader)
    return in_order(examples, batch_size, **_options(loader))


def _options(loader: DataLoader) -> dict[str, Any]:
    """Say how a loader reads examples: by which processes, collator and memory."""
    return {
        name: getattr(loader, name) for name in _OF_LOADING if hasattr(loader, name)
    }


def join_batches(parts: Iterable[Columns]) -> Columns:
    """Join the columns of batches; refuse them if only some have labels."""
    parts = list(parts)
    n_columns = {len(columns) for columns in parts}
    if len(n_columns) > 1:
        raise ValueError(
            "Some batches have labels and others have none: give all or none labels."
        )
    columns = list(zip(*parts, strict=True))
    for column in columns:
        shapes = {tuple(part.shape[1:]) for part in column}
        if len(shapes) > 1:
            raise ValueError(
                f"Batches have examples of unlike shapes, {sorted(shapes)}, as where "
                "texts have unequal numbers of choices: pass those with equally many "
                "in a loader of their own."
            )
    return tuple(torch.cat(column) for column in columns)


def join_ranks(
    indices: Tensor,
    columns: Columns | None,
    join: Callable[[Sequence[Columns]], Columns] = join_batches,
) -> Columns | None:
    """Join the ranks' tensors: their rows in the data's order.

    Takes the indices `(n,)` of this rank's rows, and columns `(n, ...)`, None on a rank
    without data; None if no rank has data. `join`, by default `join_batches`, joins the
    columns of ranks. Ranks of which only some have labels are refused by a
    `ValueError`.
    """
    if count() == 1:
        return columns
    of_ranks = gathered((indices, columns))
    with_data = [of_rank for _, of_rank in of_ranks if of_rank is not None]
    if not with_data:
        return None
    # The rows of one example stay in their order.
    all_indices = torch.cat([of_rank for of_rank, _ in of_ranks])
    order = all_indices.argsort(stable=True)
    return tuple(column[order.to(column.device)] for column in join(with_data))


def _samplers(loader: Any) -> Iterator[Any]:
    """Yield a loader's samplers, and those within them."""
    for name in ("batch_sampler", "sampler"):
        sampler = getattr(loader, name, None)
        if sampler is not None:
            yield sampler
            yield from _samplers(sampler)


def _is_divided(loader: Any) -> bool:
    """Tell whether the examples of a loader's data set are divided among the ranks."""
    is_stream = isinstance(getattr(loader, "dataset", None), IterableDatasetShard)
    if is_stream or isinstance(loader, DataLoaderDispatcher):
        raise ValueError(
            "Accelerate repeats examples where it shards an iterable data set or "
            "dispatches batches, and they would count twice: give each rank a loader "
            "of its own, without accelerator.prepare."
        )
    # Torch's word, or Accelerate's.
    return any(
        hasattr(sampler, "num_replicas") or hasattr(sampler, "num_processes")
        for sampler in _samplers(loader)
    )


def _size_of_batches(loader: Any) -> int:
    """Return the size of one rank's batches."""
    size = getattr(loader.batch_sampler, "batch_size", None)
    return size or loader.batch_size or _BATCH_SIZE
