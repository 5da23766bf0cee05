"""A function of batches over a whole data set, in its order, shared by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from laplace_lora_ext.messages import naming
from laplace_lora_ext.models.batches import IGNORED, named_batches
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.predictive.moments import Moments
from laplace_lora_ext.processes.exchange import count, together
from laplace_lora_ext.processes.shards import (
    Columns,
    Share,
    check_in_order,
    in_order,
    join_batches,
    join_ranks,
)

_BATCHES = (Mapping, Tensor, np.ndarray, tuple, Moments)
_BATCHES_AT_ONCE = 16  # that are read of a data set, to put alike lengths together

Result = TypeVar("Result")

Owners = Callable[[Any], Tensor | None]
"""Says of a batch which of its examples each row of a result is of, `(N,)`; None where
each is an example's only one."""

Join = Callable[[Sequence[Columns]], Columns]

NO_DATA = "The loader has no data. (A generator can be read once.)"


def own_rows(_: Any) -> None:
    """Say of any batch that each row is an example's only one."""


def over_loader(
    loader: Iterable[Any] | Share,
    evaluate: Callable[[Any], Columns],
    description: str = "",
    progress_bar: bool = False,
    alone: bool = False,
    join: Join = join_batches,
    owners: Owners = own_rows,
) -> Columns:
    """Evaluate a function of each batch, in the data's order and each example once.

    All ranks must call this, each with its own part of the data, and get the same,
    unless a rank is to be `alone`. A share may be passed over several times. Loaders
    without data, and with labels in some batches only, are refused by a `ValueError`;
    an error of a batch names it. Rows are examples unless `owners` say whose they are;
    `join` joins the columns of batches, and those of ranks.
    """
    # A share counts the batches of one pass: a given one is copied, to be passed over
    # again.
    share = copy(loader) if isinstance(loader, Share) else Share(loader)
    # Of batches, the rows' places in the data, and their columns.
    kept_places = [torch.empty(0, dtype=torch.long)]
    kept: list[Columns] = []
    with nullcontext() if alone else together():
        passed = batch_by_batch(
            share, evaluate, _rows, description, progress_bar, owners
        )
        for columns, places in passed:
            kept_places.append(places)
            kept.append(columns)
        own = join(kept) if kept else None
        if not alone:
            share.refuse_copies()
        of_all = own if alone else join_ranks(torch.cat(kept_places), own, join)
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
    join: Join = join_batches,
) -> Columns:
    """Evaluate as `over_loader` does, on a data set that all ranks share.

    Examples are read once, some batches at a time, and of these the longest texts come
    first: batches of alike lengths have little padding. The columns are in the data
    set's own order.
    """
    collate = collate_fn or default_collate
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
        columns = join([evaluate(batch) for batch in read["batches"]])
        places = read["order"].argsort()  # of each example among the columns
        return tuple(column[places.to(column.device)] for column in columns)

    loader = in_order(data, n_batches * batch_size, longest_first)
    return over_loader(loader, of_batches, description, progress_bar, join=join)


def _length(row: Any) -> int:
    """Count the tokens of an example; 0 where it is no text."""
    if isinstance(row, Mapping) and "input_ids" in row:
        return len(row["input_ids"])
    return 0


def over_examples(
    model: LogitsModel,
    x: Any,
    evaluate: Callable[[Any], Columns],
    collate_fn: Callable[[Any], Any] | None,
    batch_size: int,
    progress_bar: bool,
    join: Join,
) -> Columns:
    """Evaluate a function of inputs on a batch, a loader's batches or a data set."""

    def of_batch(batch: Any) -> Columns:
        return evaluate(model.inputs(batch))

    if collate_fn is None and isinstance(x, _BATCHES):
        return evaluate(x)
    if _is_data_set(x) or collate_fn is not None:
        return over_data_set(
            x,
            of_batch,
            collate_fn=collate_fn,
            batch_size=batch_size,
            description="[Predictions]",
            progress_bar=progress_bar,
            join=join,
        )
    # Dealt examples come back in the data's order.
    is_dealt = Share(x).is_dealt
    if not is_dealt:
        check_in_order(x)
    return over_loader(
        x,
        of_batch,
        description="[Predictions]",
        progress_bar=progress_bar,
        alone=not is_dealt,  # a rank's own batches are no other rank's business
        join=join,
    )


def padded(parts: Sequence[Columns]) -> Columns:
    """Join batches' columns `(B, T, ...)`, shorter texts padded by nan or -100."""
    length = max(part[0].shape[1] for part in parts)
    alike: list[Columns] = []
    for part in parts:
        columns = []
        for column in part:
            n_examples, n_tokens, *others = column.shape
            shape = (n_examples, length - n_tokens, *others)
            empty = torch.nan if column.is_floating_point() else IGNORED
            padding = column.new_full(shape, empty)
            columns.append(torch.cat([column, padding], dim=1))
        alike.append(tuple(columns))
    return join_batches(alike)


def _is_data_set(x: Any) -> bool:
    """Tell a data set from a loader; a list is one of batches."""
    is_indexed = hasattr(x, "__getitem__") and hasattr(x, "__len__")
    return is_indexed and not isinstance(x, list)
