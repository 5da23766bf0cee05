"""Notices operations of a pass that may give examples other rows than in the pass that was proven.

Sizes alone decide what most operations do with rows: these do the same in every batch of the same
sizes. Others follow numbers, such as an index, which may tell one batch's contents.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch


class Sizes(NamedTuple):
    """Numbers of rows, by which operations on rows are told from others.

    Attributes
    ----------
    rows : collection of int
        of the examples, and of what the layers see: only these rows could change places
    parts : collection of int
        of windows and the like, several an example, and of their positions: how many of them an
        example has may also change
    """

    rows: Collection[int]
    parts: Collection[int] = ()

    def concern(self, before: int, after: int) -> bool:
        """Whether an operation that makes so many rows of so many may move those that count."""
        if before in self.parts or after in self.parts:
            return True
        return before in self.rows and after in self.rows


def follows_numbers(node: Any) -> bool:
    """Whether a node of the graph may do something else with rows in another batch."""
    return _kind(node) in _RULES


def reorders(node: Any, sizes: Sizes) -> bool:
    """Whether such a node takes, writes, joins or mixes rows in another way than sizes tell.

    Sizes tell of rows that stay in their order, each of them once or equally often.
    """
    try:
        return _RULES[_kind(node)](node, sizes)
    except AttributeError:  # nodes of older PyTorch tell less
        return True


# --- rows by an index ----------------------------------------------------------------------------


def _selects(node: Any, sizes: Sizes) -> bool:
    return _moves(node._saved_index, node._saved_self_sym_sizes[_dim(node)], sizes)


def _indexes(node: Any, sizes: Sizes) -> bool:
    """Of several indices, as of each text's last position, the first one goes through examples."""
    place, index = _first(node._saved_indices)
    return _moves(index, node._saved_self_sym_sizes[place], sizes)


def _puts(node: Any, sizes: Sizes) -> bool:
    place, index = _first(node._saved_indices)
    return _writes(node, sizes) and _moves(index, _shape(node)[place], sizes)


def _adds(node: Any, sizes: Sizes) -> bool:
    return _writes(node, sizes) and _moves(node._saved_index, _shape(node)[_dim(node)], sizes)


def _gathers(node: Any, sizes: Sizes) -> bool:
    dim = _dim(node)
    return _moves(node._saved_index, node._saved_self.shape[dim], sizes, dim)


def _scatters(node: Any, sizes: Sizes) -> bool:
    dim = _dim(node)
    return _writes(node, sizes) and _moves(node._saved_index, _shape(node)[dim], sizes, dim)


def _embeds(node: Any, sizes: Sizes) -> bool:
    index = node._saved_indices
    return _moves(index.flatten(), node._saved_weight_sym_argsize_0, sizes)


def _moves(index: torch.Tensor, n_rows: int, sizes: Sizes, dim: int = 0) -> bool:
    """Whether an index into so many rows concerns rows that count, and is uneven along `dim`."""
    if index.dtype == torch.bool:  # a mask
        if index.all():
            return False
        index = index.nonzero()[:, 0]
    if not index.ndim or not sizes.concern(n_rows, index.shape[dim]):
        return False
    return not _is_even(index.movedim(dim, 0).flatten(1) if index.ndim > 1 else index, n_rows)


def _is_even(places: torch.Tensor, n_rows: int) -> bool:
    """Whether places `(n, ...)` go through so many rows in steps of the same size."""
    steps = torch.arange(len(places), device=places.device) * n_rows // max(1, len(places))
    return bool((places % max(1, n_rows) == steps.reshape(-1, *[1] * (places.ndim - 1))).all())


# --- rows taken apart and joined -----------------------------------------------------------------


def _takes(node: Any, sizes: Sizes) -> bool:
    """Parts of examples that are taken apart, unless in pieces of the same size."""
    n_rows = _rows_before(node)
    if n_rows is None or n_rows not in sizes.parts:
        return False
    if _kind(node) == "SliceBackward":
        return node._saved_start % n_rows > 0 or node._saved_end < n_rows
    if _kind(node) == "SplitWithSizesBackward":
        return len(set(node._saved_split_sizes)) > 1
    return _kind(node) == "SelectBackward"


def _joins(node: Any, sizes: Sizes) -> bool:
    """As `torch.stack([rows[i] for i in order])` does."""
    n_rows = _along(_dim(node), _shape(node))
    if n_rows not in sizes.rows and n_rows not in sizes.parts:
        return False
    sources = [_source(before, number, sizes) for before, number in node.next_functions]
    if all(source is None for source in sources):
        return False
    if None in sources or len({source[1] for source in sources}) > 1:
        return True
    return not _is_even(torch.tensor([start for start, _ in sources]), sources[0][1])


def _source(node: Any, number: int, sizes: Sizes) -> Any:
    """At which of how many rows that count the output of a node begins; None if it has all."""
    while node is not None:
        start = _START.get(_kind(node))
        if start is not None:
            n_rows = _rows_before(node)
            if n_rows and (n_rows in sizes.rows or n_rows in sizes.parts):
                return start(node, number) % n_rows, n_rows
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        node, number = edges[0] if edges else (None, 0)
    return None


def _rows_before(node: Any) -> int | None:
    """Of a tensor that is taken apart; None where it is not divided by rows."""
    if _kind(node) == "UnbindBackward":
        return len(node._input_metadata)
    return _along(_dim(node), node._saved_self_sym_sizes)


def _along(dim: int, shape: Sequence[int]) -> int | None:
    """The size along one of the first two dimensions, in which rows lie; None along others."""
    return shape[dim] if dim % len(shape) < 2 else None


_START: dict[str, Callable[[Any, int], int]] = {
    "SelectBackward": lambda node, _: node._saved_index,
    "SliceBackward": lambda node, _: node._saved_start,
    "SplitBackward": lambda node, number: number * node._saved_split_size,
    "SplitWithSizesBackward": lambda node, number: sum(node._saved_split_sizes[:number]),
    "UnbindBackward": lambda _, number: number,
}


# --- other operations ----------------------------------------------------------------------------


def _multiplies(node: Any, sizes: Sizes) -> bool:
    """By a matrix from the left, as of windows and their texts; weights of layers come second."""
    (left, number), right = node.next_functions[-2:]
    *several, n_rows, n_columns = (*_shape(node), 1)[: max(2, len(_shape(node)))]
    if several not in ([], [1]):  # a product for each example
        return False
    if right[0] is not None:
        n_mixed, *_ = _shape(*right)[-2:]
        return sizes.concern(n_mixed, n_rows)
    return _kind(left) in _TURNED and sizes.concern(_shape(left, number)[-1], n_columns)


def _sums(node: Any, sizes: Sizes) -> bool:
    """Products with such a matrix, where there may be some; a sum of all numbers has no order."""
    if not (dims := getattr(node, "_saved_dim", ())):
        return False
    before, after = node._saved_self_sym_sizes, _shape(node)
    summed = [_along(_signed(dim), before) for dim in dims]
    return len(after) > 1 and any(n is not None and sizes.concern(n, after[0]) for n in summed)


def _rotates(node: Any, sizes: Sizes) -> bool:
    """As `roll` and `flip` do."""
    rotated = [_along(_signed(dim), _shape(node)) for dim in node._saved_dims]
    return any(n is not None and sizes.concern(n, n) for n in rotated)


def _sorts(node: Any, sizes: Sizes) -> bool:
    dim = _dim(node)
    return sizes.concern(node._saved_self_sym_sizes[dim], _shape(node)[dim])


def _writes(node: Any, _: Sizes) -> bool:
    """Rows with a gradient, and not only zeros and the like, somewhere that the node hides."""
    return any(before is not None for before, _ in node.next_functions[1:])


def _picks(_: Any, __: Sizes) -> bool:
    return True


_TURNED = ("PermuteBackward", "TransposeBackward", "TBackward")

_RULES: dict[str, Callable[[Any, Sizes], bool]] = {
    "IndexSelectBackward": _selects,
    "IndexBackward": _indexes,
    "IndexPutBackward": _puts,
    "IndexAddBackward": _adds,
    "IndexCopyBackward": _adds,
    "IndexReduceBackward": _adds,
    "GatherBackward": _gathers,
    "ScatterBackward": _scatters,
    "ScatterAddBackward": _scatters,
    "ScatterReduceBackward": _scatters,
    "EmbeddingBackward": _embeds,
    "SelectBackward": _takes,
    "SliceBackward": _takes,
    "SplitWithSizesBackward": _takes,
    "StackBackward": _joins,
    "CatBackward": _joins,
    "MmBackward": _multiplies,
    "AddmmBackward": _multiplies,
    "BmmBackward": _multiplies,
    "BaddbmmBackward": _multiplies,
    "MvBackward": _multiplies,
    "SumBackward": _sums,
    "MeanBackward": _sums,
    "RollBackward": _rotates,
    "FlipBackward": _rotates,
    "SortBackward": _sorts,
    "TopkBackward": _sorts,
    "CopySlices": _writes,
    "MaskedScatterBackward": _writes,
    "MaskedSelectBackward": _picks,
    "TakeBackward": _picks,
    "SegmentReduceBackward": _picks,
    "EmbeddingBagBackward": _picks,
}

# --- what a node tells ---------------------------------------------------------------------------


def _kind(node: Any) -> str:
    return "" if node is None else node.name().rpartition("::")[2].rstrip("0123456789")


def _shape(node: Any, number: int = 0) -> tuple[int, ...]:
    """Of what the operation returned."""
    return tuple(node._input_metadata[number].shape)


def _dim(node: Any) -> int:
    return _signed(node._saved_dim)


def _signed(dim: int) -> int:
    """A dimension from the end, which autograd keeps as an unsigned number."""
    return dim - 2**64 if dim >= 2**63 else dim


def _first(indices: Iterable[torch.Tensor | None]) -> tuple[int, torch.Tensor]:
    return next((n, index) for n, index in enumerate(indices) if index is not None)
