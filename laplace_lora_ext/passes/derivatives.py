"""Jacobians of the logits in LoRA weights, one block and a part of a batch at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

import torch

from laplace_lora_ext.models.batches import number_of_rows, part_of
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.weights import Block, read
from laplace_lora_ext.passes.recording import Directions, Rows, every_output, record

# Rows that go through a layer in one backward pass of all outputs, unless a single example has
# more: on a CPU, where more are no faster, and on an accelerator.
_ON_CPU, _AT_ONCE = 768, 2**13


def visit_jacobians(
    model: LogitsModel,
    blocks: Sequence[Block],
    x: Any,
    visit: Callable[[int, torch.Tensor], None],
    enable_backprop: bool = False,
    directions: Directions = every_output,
) -> torch.Tensor:
    """One forward and one batched backward pass that give Jacobians block by block.

    `visit` receives a block's index and its Jacobian `(B, C, r, d)`, small side first, 0 where the
    logits don't depend on the block. Only one is in memory at a time, unless examples come one at a
    time; that all are finite is known at the end. The function returns the logits `(B, C)`. With
    `enable_backprop`, Jacobians and logits are differentiable in the inputs. With other
    `directions`, Jacobians are those of S combinations of the logits, in place of C. Errors are
    those of `record`.
    """
    sums: dict[int, torch.Tensor] = {}
    # Where examples or seeds come one at a time: Jacobians, and how many of their rows are there.
    incomplete: dict[int, torch.Tensor] = {}
    n_rows: Counter[int] = Counter()

    def deliver(index: int, jacobian: torch.Tensor) -> None:
        sums[index] = jacobian.detach().sum()
        visit(index, blocks[index].small_side_first(jacobian))

    def zeros(index: int) -> torch.Tensor:
        shape = len(logits), len(vectors), *blocks[index].shape
        dtype = blocks[index].statistics_dtype
        return blocks[index].values.new_zeros(shape, dtype=dtype)

    def take(rows: Rows) -> None:
        index, jacobian = rows.index, per_sample_gradients(rows.a, rows.g).transpose(0, 1)
        if jacobian.shape[:2] == (len(logits), len(vectors)):
            deliver(index, jacobian)
            return
        if index not in incomplete:  # some examples may not reach the layer
            incomplete[index] = zeros(index)
        examples = slice(None) if rows.example is None else slice(rows.example, rows.example + 1)
        incomplete[index][examples, rows.seeds] = jacobian
        n_rows[index] += len(jacobian) * jacobian.shape[1]
        if n_rows[index] == len(logits) * len(vectors):
            deliver(index, incomplete.pop(index))

    with record(model, blocks, x, enable_backprop) as recording:
        logits = recording.logits
        vectors = directions(logits.detach())
        recording.backward(vectors, None, take, at_once=len(vectors), create_graph=enable_backprop)
        for index in set(range(len(blocks))) - sums.keys():
            deliver(index, incomplete.pop(index) if index in incomplete else zeros(index))
        for index, total in zip(sums, read(list(sums.values())), strict=True):
            if not isfinite(total):
                raise ValueError(f"LoRA layer {blocks[index].name}: non-finite gradients")
        return logits if enable_backprop else logits.detach()


def jacobians(
    model: LogitsModel,
    blocks: Sequence[Block],
    x: Any,
    enable_backprop: bool = False,
    directions: Directions = every_output,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Jacobians `(B, C, parameters)` of the logits in all blocks' weights, and the logits.

    With other `directions` they are `(B, S, parameters)`.
    """
    parts: dict[int, torch.Tensor] = {}
    device = model.device

    def keep(index: int, jacobian: torch.Tensor) -> None:
        parts[index] = blocks[index].small_side_first(jacobian).flatten(-2).to(device)

    f = visit_jacobians(model, blocks, x, keep, enable_backprop, directions)
    return torch.cat([parts[index] for index in range(len(blocks))], dim=-1), f


def per_sample_gradients(a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Gradients `Σ_t g_t a_tᵀ` of a linear layer's weight, `(S, B, m, n)`.

    Of inputs a, `(B, T, n)`, and output gradients g, `(S, B, T, m)`.
    """
    return torch.einsum("bti,sbto->sboi", a, g)


def in_parts(
    model: LogitsModel,
    x: Any,
    n_outputs: int,
    evaluate: Callable[[Any, slice], Any],
    n_examples: int | None = None,
) -> list[Any]:
    """What a function makes of each few examples, or of the whole batch where parts differ from it.

    Windows of texts, say, lie in rows of their own: parts then have another number of logits than
    of rows. Logits may also depend on the other examples, as where a model normalises a batch.

    `evaluate` takes a part, and its place in the batch; what it returns has their logits `f_mu`.
    `n_outputs` vectors are back-propagated at once. Where labels tell `n_examples`, inputs with
    another number of rows stay undivided.
    """
    n_rows = number_of_rows(x)
    at_once = _ON_CPU if model.device.type == "cpu" else _AT_ONCE
    size = max(1, at_once // max(1, n_outputs * _n_positions(x)))
    if n_rows is None or n_rows <= size or n_examples not in (None, n_rows):
        return [evaluate(x, slice(None))]
    results: list[Any] = []
    for places in torch.arange(n_rows).tensor_split(-(-n_rows // size)):
        place = slice(int(places[0]), int(places[-1]) + 1)
        results.append(evaluate(part_of(x, place, n_rows), place))
        if len(results[-1].f_mu) != len(places):
            return [evaluate(x, slice(None))]
    if model.layouts.examples_apart:
        with model.prepared(), torch.no_grad():
            whole = model(x)
        if not model.agree(whole, torch.cat([result.f_mu for result in results]).to(whole)):
            return [evaluate(x, slice(None))]
    return results


def _n_positions(x: Any) -> int:
    """Tokens of an example, where they can be seen."""
    tokens = x.get("input_ids") if isinstance(x, Mapping) else x
    if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2 or tokens.is_floating_point():
        return 1
    return tokens.shape[1:].numel()
