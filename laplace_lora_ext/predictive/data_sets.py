"""A function of batches over a whole data set, in its order, shared by all ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import default_collate

from laplace_lora_ext.messages import naming
from laplace_lora_ext.models.batches import named_batches
from laplace_lora_ext.processes.exchange import count, rank, together
from laplace_lora_ext.processes.shards import (
    Columns,
    Share,
    in_order,
    join_batches,
    join_ranks,
)

_BATCHES_AT_ONCE = 16  # that are read of a data set, to put alike lengths together

Result = TypeVar("Result")

Owners = Callable[[Any], Tensor | None]
"""Says of a batch which of its examples each row of a result is of, `(N,)`; None where
each is an example's only one."""

NO_DATA = "The loader has no data. (A generator can be read once.)"


def own_rows(_: Any) -> None:
    """Say of any batch that each row is an example's only one."""


class Sample:
    """Keeps rows of batches, drawn at random where there are too many.

    Each row has a random number, the same in every pass, and those with the smallest
    stay. So at no time are there more than asked for and a batch.

    Parameters
    ----------
    at_most : int, optional
        rows of all ranks together; by default all are kept
    join : callable, default=join_batches
        joins the columns of batches, and those of ranks

    Attributes
    ----------
    n_left_out : int
        of this rank, so far
    """

    def __init__(
        self,
        at_most: int | None = None,
        join: Callable[[Sequence[Columns]], Columns] = join_batches,
    ) -> None:
        self.n_left_out = 0
        self.join = join
        # Where examples are dealt in turn, this is all of a rank's if all ranks' are
        # not too many.
        self._at_most = sys.maxsize
        if at_most is not None:
            self._at_most = len(range(rank(), at_most, count()))
        self._generator = torch.Generator().manual_seed(0)
        self._parts: list[_Part] = []
        self._n_rows = 0  # of the parts

    def add(
        self,
        columns: Columns,
        places: Tensor,
    ) -> None:
        """Take in the rows of a batch, and where they belong in the data."""
        numbers = torch.rand(
            len(places), generator=self._generator, dtype=torch.float64
        )
        self._parts.append(_Part(numbers, places, columns))
        self._n_rows += len(places)
        if self._n_rows > self._at_most:
            self._leave_out(self._n_rows - self._at_most)

    def _leave_out(self, n_rows: int) -> None:
        """Leave out the rows with the largest numbers."""
        of_all = torch.cat([part.numbers for part in self._parts])
        least = of_all.topk(n_rows).values[-1]
        parts = [part.below(least) for part in self._parts]
        # An empty part still tells which columns there are, on a rank that keeps none.
        with_rows = [part for part in parts if len(part.numbers)]
        self._parts = with_rows or parts[:1]
        self._n_rows -= n_rows
        self.n_left_out += n_rows

    def places(self) -> Tensor:
        """Return where the rows that are kept belong in the data."""
        none = torch.empty(0, dtype=torch.long)
        return torch.cat([none, *(part.places for part in self._parts)])

    def columns(self) -> Columns | None:
        """Join what is kept; None where there was no batch."""
        return (
            self.join([part.columns for part in self._parts]) if self._parts else None
        )


class _Part(NamedTuple):
    """What is kept of a batch."""

    numbers: Tensor  # (n,), by which rows are drawn
    places: Tensor
    columns: Columns

    def below(self, number: Tensor) -> _Part:
        """Leave out rows whose number is not below another."""
        is_kept = self.numbers < number
        if is_kept.all():
            return self
        columns = tuple(column[is_kept.to(column.device)] for column in self.columns)
        return _Part(self.numbers[is_kept], self.places[is_kept], columns)


def over_loader(
    loader: Iterable[Any] | Share,
    evaluate: Callable[[Any], Columns],
    description: str = "",
    progress_bar: bool = False,
    alone: bool = False,
    sample: Sample | None = None,
    owners: Owners = own_rows,
) -> Columns:
    """Evaluate a function of each batch, in the data's order and each example once.

    All ranks must call this, each with its own part of the data, and get the same,
    unless a rank is to be `alone`. A share may be passed over several times. Loaders
    without data, and with labels in some batches only, are refused by a `ValueError`;
    an error of a batch names it. A `sample` keeps some of the rows, which are examples
    unless `owners` say whose they are.
    """
    # A share counts the batches of one pass: a given one is copied, to be passed over
    # again.
    share = copy(loader) if isinstance(loader, Share) else Share(loader)
    kept = sample or Sample()
    with nullcontext() if alone else together():
        passed = batch_by_batch(
            share, evaluate, _rows, description, progress_bar, owners
        )
        for columns, places in passed:
            kept.add(columns, places)
        own = kept.columns()
        if not alone:
            share.refuse_copies()
        of_all = own if alone else join_ranks(kept.places(), own, kept.join)
    if of_all is None:
        raise ValueError(NO_DATA)
    return of_all


def batch_by_batch(
    share: Share,
    evaluate: Callable[[Any], Result],
    size: Callable[[Result], int],
    description: str = "",
    progress_bar: bool = False,
    owners: Owners = own_rows,
) -> Iterator[tuple[Result, Tensor]]:
    """Evaluate a function batch by batch; yield results and their rows' places.

    `size` tells how many rows a result has. Batches of which no example is to count,
    since they only keep the ranks' passes alike, yield nothing.
    """
    for name, batch in named_batches(share.loader, description, progress_bar):
        share.show(batch)
        with naming(name):
            of_rows = owners(batch)
            if of_rows is not None and not len(of_rows):  # texts without a label
                share.places(0, of_rows)
                continue
            # Also of a batch that counts nowhere: ranks that share a model pass over it
            # together.
            result = evaluate(batch)
            places = share.places(size(result), of_rows)
        if len(places):
            yield result, places


def _rows(columns: Columns) -> int:
    return len(columns[0])


def over_data_set(
    data: Any,
    evaluate: Callable[[Any], Columns],
    collate_fn: Callable[[Any], Any] | None,
    batch_size: int,
    description: str,
    progress_bar: bool,
    sample: Sample | None = None,
) -> Columns:
    """Evaluate as `over_loader` does, on a data set that all ranks share.

    Examples are read once, some batches at a time, and of these the longest texts come
    first: batches of alike lengths have little padding. The columns are in the data
    set's own order.
    """
    collate = collate_fn or default_collate
    kept = sample or Sample()
    # Ranks that share a model must make equally many passes.
    n_batches = 1 if count() > 1 else _BATCHES_AT_ONCE

    def longest_first(rows: list[Any]) -> dict[str, Any]:
        lengths = torch.tensor([_length(row) for row in rows])
        order = lengths.argsort(descending=True, stable=True)
        batches: list[Any] = []
        for places in order.split(batch_size):
            batches.append(collate([rows[place] for place in places.tolist()]))
        return {"order": order, "batches": batches}

    def of_batches(read: dict[str, Any]) -> Columns:
        columns = kept.join([evaluate(batch) for batch in read["batches"]])
        places = read["order"].argsort()  # of each example among the columns
        return tuple(column[places.to(column.device)] for column in columns)

    loader = in_order(data, n_batches * batch_size, longest_first)
    return over_loader(loader, of_batches, description, progress_bar, sample=kept)


def _length(row: Any) -> int:
    """Count the tokens of an example; 0 where it is no text."""
    if isinstance(row, Mapping) and "input_ids" in row:
        return len(row["input_ids"])
    return 0
