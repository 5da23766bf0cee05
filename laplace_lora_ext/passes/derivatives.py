"""Jacobians of the logits in LoRA weights, one block at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import torch

from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import Block
from laplace_lora_ext.passes.recording import Directions, Rows, every_output, record
from laplace_lora_ext.readings import read


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
    logits don't depend on the block. Only one is held at a time, unless examples share rows; that
    all are finite is known at the end. The function returns the logits `(B, C)`. With
    `enable_backprop`, Jacobians and logits are differentiable in the inputs. With other
    `directions`, Jacobians are those of S combinations of the logits, in place of C. Errors are
    those of `record`.
    """
    unreached = set(range(len(blocks)))
    of_examples: dict[int, list[torch.Tensor]] = {}  # where they come one at a time
    sums: dict[int, torch.Tensor] = {}

    def take(rows: Rows) -> None:
        parts = of_examples.setdefault(rows.index, [])
        parts.append(per_sample_gradients(rows.a, rows.g).transpose(0, 1))
        if sum(map(len, parts)) < len(recording.logits):
            return
        unreached.discard(rows.index)
        del of_examples[rows.index]
        jacobian = parts[0] if len(parts) == 1 else torch.cat(parts)
        sums[rows.index] = jacobian.detach().sum()
        visit(rows.index, blocks[rows.index].small_side_first(jacobian))

    with record(model, blocks, x, enable_backprop) as recording:
        vectors = directions(recording.logits.detach())
        recording.backward(vectors, None, take, at_once=len(vectors), create_graph=enable_backprop)
        for index, total in zip(sums, read(list(sums.values())), strict=True):
            if not isfinite(total):
                raise ValueError(f"LoRA layer {blocks[index].name}: non-finite gradients")
        for index in unreached:
            block, rows = blocks[index], directions(recording.logits.detach()).shape[:2]
            zeros = block.values.new_zeros(
                *reversed(rows), *block.shape, dtype=block.statistics_dtype
            )
            visit(index, block.small_side_first(zeros))
        return recording.logits if enable_backprop else recording.logits.detach()


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
