"""A function of batches over a whole data set, in its order, shared by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from laplace_lora_ext.messages import naming
from laplace_lora_ext.models.batches import IGNORED
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.predictive.moments import Moments
from laplace_lora_ext.processes import count, together
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

Result = TypeVar("Result", bound=Sequence[Any])

Owners = Callable[[Any], Tensor | None]
"""Says of a batch which of its examples each row of a result is of, `(N,)`; None where
each is an example's only one."""

Join = Callable[[Sequence[Columns]], Columns]

NO_DATA = "The loader has no data. (A generator can be read once.)"


def over_loader(
    loader: Iterable[Any] | Share,
    evaluate: Callable[[Any], Columns],
    description: str = "",
    progress_bar: bool = False,
    alone: bool = False,
    join: Join = join_batches,
    owners: Owners | None = None,
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
    # Of batches, the rows' indices in the data, and their columns.
    kept_indices = [torch.empty(0, dtype=torch.long)]
    kept: list[Columns] = []
    with nullcontext() if alone else together():
        passed = batch_by_batch(share, evaluate, description, progress_bar, owners)
        for columns, indices in passed:
            kept_indices.append(indices)
            kept.append(columns)
        own = join(kept) if kept else None
        if not alone:
            share.refuse_copies()
        of_all = own if alone else join_ranks(torch.cat(kept_indices), own, join)
    if of_all is None:
        raise ValueError(NO_DATA)
    return of_all


def batch_by_batch(
    share: Share,
    evaluate: Callable[[Any], Result],
    description: str,
    progress_bar: bool,
    owners: Owners | None,
) -> Iterator[tuple[Result, Tensor]]:
    """Evaluate a function batch by batch; yield results and their rows' indices.

    All parts of a result have equally many rows. Batches of which no example is to
    count, since they only keep the ranks' passes alike, yield nothing.
    """
    for name, batch in share.batches(description, progress_bar):
        with naming(name):
            of_rows = None if owners is None else owners(batch)
            # Also of a batch that counts nowhere: ranks that share a model pass over it
            # together.
            result = evaluate(batch)
            indices = share.take_indices(len(result[0]), of_rows)
        if len(indices):
            yield result, indices


def over_examples(
    model: LogitsModel,
    x: Any,
    evaluate: Callable[[Any], Columns],
    collate_fn: Callable[[Any], Any] | None,
    batch_size: int,
    progress_bar: bool,
    join: Join,
) -> Columns:
    """Evaluate a function of inputs on a batch, a loader's batches or a data set.

    The columns are in the data's own order. All ranks share a data set, or a loader
    that is dealt. Examples of a data set are read once, some batches at a time, and of
    these the longest texts come first: batches of alike lengths have little padding.
    """
    if collate_fn is None and isinstance(x, _BATCHES):
        return evaluate(x)
    collate = collate_fn or _stacked

    def longest_first(rows: list[Any]) -> tuple[Tensor, list[Any]]:
        order = torch.tensor([_length(row) for row in rows])
        order = order.argsort(descending=True, stable=True)
        places = order.split(batch_size)
        return order, [collate([rows[place] for place in part]) for part in places]

    def of_batch(batch: Any) -> Columns:
        return evaluate(model.inputs(batch))

    def of_batches(read: tuple[Tensor, list[Any]]) -> Columns:
        order, batches = read
        columns = join([of_batch(batch) for batch in batches])
        places = order.argsort()  # of each example among the columns
        return tuple(column[places.to(column.device)] for column in columns)

    # A list is one of batches.
    is_indexed = hasattr(x, "__getitem__") and hasattr(x, "__len__")
    is_data_set = collate_fn is not None or (is_indexed and not isinstance(x, list))
    is_own = False  # whether the batches are this rank's alone
    if is_data_set:
        # Ranks that share a model must make equally many passes.
        n_batches = 1 if count() > 1 else _BATCHES_AT_ONCE
        x = in_order(x, n_batches * batch_size, collate_fn=longest_first)
    elif not Share(x).is_dealt:  # dealt examples come back in the data's order
        check_in_order(x)
        is_own = True
    return over_loader(
        x,
        of_batches if is_data_set else of_batch,
        "[Predictions]",
        progress_bar,
        alone=is_own,
        join=join,
    )


def _stacked(rows: list[Any]) -> Any:
    """Make a batch of rows as they are; refuse texts of several lengths."""
    try:
        return default_collate(rows)
    except RuntimeError as error:
        raise ValueError(
            "The data set's rows have several lengths: pass a collate_fn that pads "
            "them, such as DataCollatorWithPadding(tokenizer)."
        ) from error


def _length(row: Any) -> int:
    """Count the tokens of an example; 0 where it is no text."""
    if isinstance(row, Mapping) and "input_ids" in row:
        return len(row["input_ids"])
    return 0


def padded(parts: Sequence[Columns]) -> Columns:
    """Join batches' columns `(B, T, ...)`, shorter texts padded by nan or -100."""
    columns: list[Tensor] = []
    for of_parts in zip(*parts, strict=True):
        texts = [text for part in of_parts for text in part]
        empty = torch.nan if texts[0].is_floating_point() else IGNORED
        columns.append(pad_sequence(texts, batch_first=True, padding_value=empty))
    return tuple(columns)
