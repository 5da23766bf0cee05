"""Batches in parts, so that gradients of many outputs at once stay small."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from laplace_lora_ext.processes.shards import rows

# Rows that go through a layer in one backward pass of all outputs, unless a single example has
# more: as many as 32 texts of 64 tokens with four classes.
_AT_ONCE = 2**13


def parts_of(x: Any, n_outputs: int) -> Iterator[tuple[Any, slice]]:
    """Divide a batch into parts of a few examples; each comes with its place in the batch.

    Only memory changes, since each example's gradients are its own. Inputs that are not tensors
    with one row for each example stay undivided.

    Parameters
    ----------
    x : Mapping, torch.Tensor or numpy.ndarray
        inputs of a batch
    n_outputs : int
        C, how many outputs are back-propagated at once
    """
    if isinstance(x, np.ndarray):
        x = torch.as_tensor(x)
    shapes = [value.shape for value in _tensors(x)]
    n_examples = len(x) if isinstance(x, torch.Tensor) else _common_length(shapes)
    size = max(1, _AT_ONCE // max(1, n_outputs * _n_positions(x)))
    if n_examples is None or n_examples <= size:
        yield x, slice(None)
        return
    index = torch.arange(n_examples)
    for start in range(0, n_examples, size):
        part = slice(start, start + size)
        yield rows(x, (index >= start) & (index < start + size)), part


def _tensors(x: Any) -> list[torch.Tensor]:
    values = x.values() if isinstance(x, Mapping) else [x]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _common_length(shapes: list[torch.Size]) -> int | None:
    """The number of rows, if all tensors have the same."""
    lengths = {shape[0] if shape else None for shape in shapes}
    return lengths.pop() if len(lengths) == 1 else None


def _n_positions(x: Any) -> int:
    """Tokens of an example, where they can be seen."""
    tokens = x.get("input_ids") if isinstance(x, Mapping) else x
    if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2 or tokens.is_floating_point():
        return 1
    return tokens.shape[1:].numel()
