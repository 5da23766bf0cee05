"""Batches in parts, so that gradients of many outputs at once stay small."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from laplace_lora_ext.models.default_device import as_tensor
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.passes.assignment import any_shared
from laplace_lora_ext.processes.shards import rows

# Rows that go through a layer in one backward pass of all outputs, unless a single example has
# more: as many as 32 texts of 64 tokens with four classes.
_AT_ONCE = 2**13


class Evaluated(Protocol):
    """What is known of some examples."""

    @property
    def f_mu(self) -> torch.Tensor: ...  # (N, C)


Result = TypeVar("Result", bound=Evaluated)


def in_parts(
    model: LogitsModel,
    x: Any,
    n_outputs: int,
    evaluate: Callable[[Any, slice], Result],
    n_examples: int | None = None,
) -> list[Result]:
    """What a function makes of each part, or of the whole batch where parts are something else.

    Windows of texts, say, lie in rows of their own: parts then have another number of logits than
    of rows. Logits may also depend on the other examples, as where a model normalises a batch.

    Parameters
    ----------
    model : LogitsModel
    x, n_outputs, n_examples
        as for `parts_of`
    evaluate : callable
        takes a part, and its place in the batch
    """
    results: list[Result] = []
    parts = list(parts_of(x, n_outputs, n_examples))
    for part, place in parts:
        results.append(evaluate(part, place))
        if len(parts) > 1 and len(results[-1].f_mu) != len(range(place.stop)[place]):
            return [evaluate(x, slice(None))]
    if len(parts) > 1 and any_shared(model.layouts):
        with model.prepared(), torch.no_grad():
            whole = model(x)
        if not model.agree(whole, torch.cat([result.f_mu for result in results]).to(whole)):
            return [evaluate(x, slice(None))]
    return results


def parts_of(x: Any, n_outputs: int, n_examples: int | None = None) -> Iterator[tuple[Any, slice]]:
    """Divide a batch into parts of a few examples; each comes with its place in the batch.

    Only memory changes, since each example's gradients are its own. Inputs that are not tensors
    with one row for each example stay undivided.

    Parameters
    ----------
    x : Mapping, torch.Tensor or numpy.ndarray
        inputs of a batch
    n_outputs : int
        C, how many outputs are back-propagated at once
    n_examples : int, optional
        B, where labels tell; inputs with other rows stay undivided
    """
    if isinstance(x, np.ndarray):
        x = as_tensor(x)
    shapes = [value.shape for value in _tensors(x)]
    n_rows = len(x) if isinstance(x, torch.Tensor) else _common_length(shapes)
    size = max(1, _AT_ONCE // max(1, n_outputs * _n_positions(x)))
    if n_rows is None or n_rows <= size or n_examples not in (None, n_rows):
        yield x, slice(None)
        return
    index = torch.arange(n_rows)
    for start in range(0, n_rows, size):
        part = slice(start, min(start + size, n_rows))
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
