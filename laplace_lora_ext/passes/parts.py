"""Batches in parts, so that gradients of many outputs at once stay small."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from laplace_lora_ext.models.batches import number_of_rows
from laplace_lora_ext.models.locks import as_tensor
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.passes.proof import ONE_AT_A_TIME

# Rows that go through a layer in one backward pass of all outputs, unless a single example has
# more: on a CPU, where more are no faster, and on an accelerator.
_ON_CPU, _AT_ONCE = 768, 2**13


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
    """What a function makes of each few examples, or of the whole batch where parts differ from it.

    Windows of texts, say, lie in rows of their own: parts then have another number of logits than
    of rows. Logits may also depend on the other examples, as where a model normalises a batch.

    Parameters
    ----------
    model : LogitsModel
    x : Mapping, torch.Tensor or numpy.ndarray
        inputs of a batch
    n_outputs : int
        C, how many outputs are back-propagated at once
    evaluate : callable
        takes a part, and its place in the batch
    n_examples : int, optional
        B, where labels tell; inputs with other rows stay undivided
    """
    if isinstance(x, np.ndarray):
        x = as_tensor(x)
    n_rows = number_of_rows(x)
    at_once = _ON_CPU if model.device.type == "cpu" else _AT_ONCE
    size = max(1, at_once // max(1, n_outputs * _n_positions(x)))
    if n_rows is None or n_rows <= size or n_examples not in (None, n_rows):
        return [evaluate(x, slice(None))]
    results: list[Result] = []
    for places in torch.arange(n_rows).tensor_split(-(-n_rows // size)):
        place = slice(int(places[0]), int(places[-1]) + 1)
        results.append(evaluate(_rows(x, place, n_rows), place))
        if len(results[-1].f_mu) != len(places):
            return [evaluate(x, slice(None))]
    if model.layouts.get(ONE_AT_A_TIME):
        with model.prepared(), torch.no_grad():
            whole = model(x)
        if not model.agree(whole, torch.cat([result.f_mu for result in results]).to(whole)):
            return [evaluate(x, slice(None))]
    return results


def _rows(x: Any, place: slice, n_rows: int) -> Any:
    if isinstance(x, Mapping):
        return {key: _rows(value, place, n_rows) for key, value in x.items()}
    divisible = isinstance(x, torch.Tensor | np.ndarray | list) and len(x) == n_rows
    return x[place] if divisible else x


def _n_positions(x: Any) -> int:
    """Tokens of an example, where they can be seen."""
    tokens = x.get("input_ids") if isinstance(x, Mapping) else x
    if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2 or tokens.is_floating_point():
        return 1
    return tokens.shape[1:].numel()
