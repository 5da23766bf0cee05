"""Notices operations of a pass that may put the rows of its examples in another order."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

# Backward nodes of x[index] and the like, by what they have saved.
_ONE_INDEX = ("IndexSelectBackward", "IndexAddBackward", "IndexCopyBackward")
_SEVERAL = ("IndexBackward", "IndexPutBackward")
_OF_EACH_NUMBER = ("GatherBackward", "ScatterBackward", "ScatterAddBackward")
_JOINING = ("StackBackward", "CatBackward")  # as of [rows[i] for i in order]


def picks_rows(node: Any) -> bool:
    """Whether a node of the graph takes or writes rows by an index, or joins some."""
    return _kind(node) in (*_ONE_INDEX, *_SEVERAL, *_OF_EACH_NUMBER, *_JOINING)


def reorders(node: Any, sizes: Collection[int]) -> bool:
    """Whether such a node takes, writes or joins one of these numbers of rows out of their order.

    An index that rises keeps the examples in order, whatever else it does. Of several indices, as
    of each text's last position, the first one goes through the examples.
    """
    kind = _kind(node)
    if kind in _JOINING:
        places = [_place(before, number) for before, number in node.next_functions]
        return len(places) in sizes and places != sorted(places)
    if kind in _OF_EACH_NUMBER:
        index = node._saved_index
        return node._saved_dim == 0 and len(index) in sizes and _falls(index)
    if kind in _ONE_INDEX:
        index = node._saved_index
    else:
        index = next(index for index in node._saved_indices if index is not None)
    return index.numel() in sizes and _falls(index.flatten())


def _place(node: Any, number: int) -> int:
    """Which row of a tensor an output of a node is; 0 of a node that takes no rows apart."""
    return node._saved_index if node is not None and _kind(node) == "SelectBackward" else number


def _kind(node: Any) -> str:
    return node.name().rstrip("0123456789")


def _falls(index: torch.Tensor) -> bool:
    """Whether an index falls anywhere along its first dimension; a mask picks rows in order."""
    return index.dtype != torch.bool and bool((index[1:] < index[:-1]).any())
