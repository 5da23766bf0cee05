"""Which LoRA layers ran, and checks of the passes that the host makes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from laplace_lora_ext.models.weights import Block
from laplace_lora_ext.passes.graph import (
    check_differentiable,
    check_logits,
    refuse_reentrant,
    tapped,
)
from laplace_lora_ext.passes.recorder import Recorder


@contextmanager
def noting_calls(blocks: Sequence[Block], called: set[int]) -> Iterator[None]:
    """Add to `called` the indices of blocks whose layers are called within."""

    def note(index: int, *_: Any) -> None:
        called.add(index)
        if not torch.is_grad_enabled():
            refuse_reentrant()

    with ExitStack() as hooks:
        for index, block in enumerate(blocks):
            hooks.callback(block.rows.layer.register_forward_hook(partial(note, index)).remove)
        yield


def check_called(blocks: Sequence[Block], called: Collection[int]) -> None:
    """Refuse a fit in which some layers were never called, and so have no curvature."""
    silent = [block.name for index, block in enumerate(blocks) if index not in called]
    if not silent:
        return
    advice = "Leave such layers out with target_modules, or fit on data that use them."
    if len(silent) == len(blocks):
        advice = "A fused kernel may replace them: pass the model as it was before fusion."
    raise RuntimeError(
        f"No batch used {len(silent)} of {len(blocks)} LoRA weights, such as {silent[0]}. {advice}"
    )


@contextmanager
def inspected(
    recorder: Recorder,
    x: Any,
    check_targets: Callable[[torch.Tensor], object],
) -> Iterator[None]:
    """Check passes that the host makes on a batch `x`; errors are those of `run`.

    What the first one returns goes to `check_targets`. Hooks that the host leaves behind are
    removed, and where it fails, one more pass names the reason.
    """
    model, blocks = recorder.model, recorder.blocks
    called: set[int] = set()
    differentiable: list[bool] = []

    def finished(_: nn.Module, __: tuple, logits: torch.Tensor) -> None:
        check_logits(logits)
        if not differentiable:  # others may be of one example
            check_targets(logits)
        # A pass for functional derivatives, of which there may be others, has no graph of its own.
        differentiable.append(logits.requires_grad)

    try:
        with _without_new_hooks(model), noting_calls(blocks, called):
            model.register_forward_hook(finished)
            yield
    except Exception as error:
        with tapped(model, blocks, recorder.layouts) as taps:
            graph = taps.run(x)
        of_blocks = zip(blocks, graph.calls, strict=True)
        silent = [block.name for block, calls in of_blocks if not calls]
        if silent:
            raise RuntimeError(
                f"The batch does not use {len(silent)} of {len(blocks)} LoRA weights, such as "
                f"{silent[0]}, but the backend needs all of them in every batch. Leave such layers "
                'out with target_modules, or use hessian_structure="lowrank_kron".'
            ) from error
        raise
    if called:
        check_differentiable(any(differentiable))


@contextmanager
def _without_new_hooks(model: nn.Module) -> Iterator[None]:
    """Remove all hooks that were added within."""
    before = [
        (hooks, set(hooks))
        for module in model.modules()
        for name, hooks in vars(module).items()
        if "_hooks" in name and isinstance(hooks, dict)
    ]
    try:
        yield
    finally:
        for hooks, known in before:
            for key in set(hooks) - known:
                del hooks[key]
