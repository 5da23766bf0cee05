"""A function of batches over a whole data set, in its order, shared by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from copy import copy
from typing import Any, TypeVar

import torch
from torch.utils.data import Subset

from laplace_lora_ext.messages import naming
from laplace_lora_ext.models.batches import named_batches
from laplace_lora_ext.processes.exchange import together
from laplace_lora_ext.processes.shards import Columns, Share, in_order, joined, stacked

Result = TypeVar("Result")

NO_DATA = "The loader has no data. (A generator can be read once.)"


def over_loader(
    loader: Iterable[Any] | Share,
    evaluate: Callable[[Any], Columns],
    description: str = "",
    progress_bar: bool = False,
    alone: bool = False,
) -> Columns:
    """Evaluate a function of each batch, in the data's order and each example once.

    All ranks must call this, each with its own part of the data, and get the same, unless a rank is
    to be `alone`. A share may be passed over several times. Loaders without data, and with labels
    in some batches only, are refused by a `ValueError`; an error of a batch names it.
    """
    # A share counts the batches of one pass: a given one is copied, to be passed over again.
    share = copy(loader) if isinstance(loader, Share) else Share(loader)
    parts: list[Columns] = []
    places = [torch.empty(0, dtype=torch.long)]  # where the examples of the parts belong
    with nullcontext() if alone else together():
        passed = batch_by_batch(share, evaluate, _rows, description, progress_bar)
        for columns, of_batch in passed:
            parts.append(columns)
            places.append(of_batch)
        own = stacked(parts) if parts else None
        of_all = own if alone else joined(torch.cat(places), own)
    if of_all is None:
        raise ValueError(NO_DATA)
    return of_all


def batch_by_batch(
    share: Share,
    evaluate: Callable[[Any], Result],
    size: Callable[[Result], int],
    description: str = "",
    progress_bar: bool = False,
) -> Iterator[tuple[Result, torch.Tensor]]:
    """Evaluate a function of each batch of a share; yield the result and its examples' places.

    `size` tells how many examples a result is of. Batches of which no example is to count, since
    they only keep the ranks' passes alike, yield nothing.
    """
    for name, batch in named_batches(share.loader, description, progress_bar):
        with naming(name):
            # Also of a batch that counts nowhere: ranks that share a model pass over it together.
            result = evaluate(batch)
            places = share.places(size(result))
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
) -> Columns:
    """Evaluate as `over_loader` does, on a data set that all ranks share.

    Its longest texts come first: batches of alike lengths have little padding, and if memory does
    not suffice, this shows at once. The columns are in the data set's own order.
    """
    lengths = torch.tensor([_length(data[place]) for place in range(len(data))])
    order = lengths.argsort(descending=True, stable=True)
    loader = in_order(Subset(data, order.tolist()), batch_size, collate_fn)
    columns = over_loader(loader, evaluate, description, progress_bar)
    places = order.argsort()  # of each example among the columns
    return tuple(column[places.to(column.device)] for column in columns)


def _length(row: Any) -> int:
    """Count the tokens of an example; 0 where it is no text."""
    if isinstance(row, Mapping) and "input_ids" in row:
        return len(row["input_ids"])
    return 0
