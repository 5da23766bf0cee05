"""Checks of forward passes: LoRA layers that ran, numbers that are finite, logits with a gradient.

The library's own passes are checked by `Recording`, those that the host runs by `inspected`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import Block


def check_called(blocks: Sequence[Block], n_calls: Sequence[int]) -> None:
    """Refuse a forward pass that went around LoRA layers."""
    silent = [block.name for block, calls in zip(blocks, n_calls, strict=True) if not calls]
    if silent:
        raise RuntimeError(
            f"{len(silent)} of {len(blocks)} LoRA layers were bypassed in the forward pass, such "
            f"as {silent[0]}: a compiled model or a fused kernel does not run them as modules. "
            "Pass the model as it was before torch.compile or fusion."
        )


def check_activations(block: Block, *tensors: torch.Tensor) -> None:
    """Refuse inputs or outputs of a layer that are not finite."""
    if not all(torch.isfinite(tensor).all() for tensor in tensors):
        raise ValueError(f"LoRA layer {block.name}: non-finite activations")


def check_logits(logits: torch.Tensor) -> None:
    """Refuse logits that are not finite."""
    if not torch.isfinite(logits).all():
        raise ValueError("non-finite logits, though every LoRA layer's activations are finite")


def check_differentiable(*logits_require_grad: bool) -> None:
    """Refuse passes of which none gives logits that a gradient can start from."""
    if not any(logits_require_grad):
        raise RuntimeError(
            "The logits carry no gradient to the LoRA layers: the model detaches them, or runs "
            "under torch.no_grad."
        )


@contextmanager
def inspected(
    model: LogitsModel,
    blocks: Sequence[Block],
    x: Any,
    check_targets: Callable[[torch.Tensor], object],
) -> Iterator[None]:
    """Check passes that the host makes on a batch `x`.

    Each pass must call the layers of all blocks; what it returns goes to `check_targets`. Where the
    host fails, the hooks that it leaves behind are removed, and one more pass names the reason.

    Raises
    ------
    RuntimeError, ValueError
        As `record`.
    """
    model.settle(x)
    restore_hooks = _remember_hooks(model)
    try:
        with _checking(model, blocks, check_targets):
            yield
    except BaseException as error:
        restore_hooks()
        if isinstance(error, Exception):
            with _checking(model, blocks, check_targets):
                model(x)
        raise


@contextmanager
def _checking(
    model: LogitsModel, blocks: Sequence[Block], check_targets: Callable[[torch.Tensor], object]
) -> Iterator[None]:
    n_calls = [0] * len(blocks)
    differentiable: list[bool] = []

    def called(index: int, _: nn.Module, args: tuple, output: torch.Tensor) -> None:
        n_calls[index] += 1
        check_activations(blocks[index], args[0], output)

    def finished(_: nn.Module, __: tuple, logits: torch.Tensor) -> None:
        check_called(blocks, n_calls)
        n_calls[:] = [0] * len(blocks)
        check_logits(logits)
        check_targets(logits)
        # A pass for functional derivatives, of which there may be others, has no graph of its own.
        differentiable.append(logits.requires_grad)

    handles = [model.register_forward_hook(finished)]
    for index, block in enumerate(blocks):
        handles.append(block.layer.register_forward_hook(partial(called, index)))
    try:
        yield
        check_differentiable(*differentiable)
    finally:
        for handle in handles:
            handle.remove()


def _remember_hooks(model: nn.Module) -> Callable[[], None]:
    """What removes the hooks that are added from now on."""
    before = [
        (hooks, set(hooks))
        for module in model.modules()
        for name, hooks in vars(module).items()
        if "_hooks" in name and isinstance(hooks, dict)
    ]

    def restore() -> None:
        for hooks, known in before:
            for key in set(hooks) - known:
                del hooks[key]

    return restore
