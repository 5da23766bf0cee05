"""A function of batches over a whole data set, in its order, shared by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from copy import copy
from typing import Any

import torch
from torch.utils.data import Subset

from laplace_lora_ext.messages import naming
from laplace_lora_ext.models.batches import named_batches
from laplace_lora_ext.processes.exchange import together
from laplace_lora_ext.processes.shards import Share, in_order, joined, stacked

Columns = tuple[torch.Tensor, ...]
"""Tensors with a row for each example."""


def over_loader(
    loader: Iterable[Any] | Share,
    evaluate: Callable[[Any], Columns],
    description: str = "",
    progress_bar: bool = False,
    alone: bool = False,
) -> Columns:
    """What a function makes of each batch, in the data's order and each example once.

    All ranks must call this, each with its own part of the data, and get the same, unless a rank is
    to be `alone`. A share may be passed over several times. Loaders without data, and with labels
    in some batches only, are refused by a `ValueError`; an error of a batch names it.
    """
    share = copy(loader) if isinstance(loader, Share) else Share(loader)  # it counts batches
    parts, found = [], [torch.empty(0, dtype=torch.long)]
    with nullcontext() if alone else together():
        for name, batch in named_batches(share.loader, description, progress_bar):
            with naming(name):
                columns = evaluate(batch)
                places = share.places(len(columns[0]))
            if len(places):
                parts.append(columns)
                found.append(places)
        own = stacked(parts) if parts else None
        of_all = own if alone else joined(torch.cat(found), own)
    if of_all is None:
        raise ValueError("The loader has no data. (A generator can be read once.)")
    return of_all


def over_data_set(
    data: Any,
    evaluate: Callable[[Any], Columns],
    collate_fn: Callable[[Any], Any] | None,
    batch_size: int,
    description: str,
    progress_bar: bool,
) -> Columns:
    """As `over_loader`, of a data set that all ranks share, its longest texts first."""
    rows = (data[place] for place in range(len(data)))
    lengths = [
        len(row["input_ids"]) if isinstance(row, Mapping) and "input_ids" in row else 0
        for row in rows
    ]
    order = torch.tensor(lengths).argsort(descending=True, stable=True)
    loader = in_order(Subset(data, order.tolist()), batch_size, collate_fn)
    columns = over_loader(loader, evaluate, description, progress_bar)
    return tuple(column[order.argsort().to(column.device)] for column in columns)
