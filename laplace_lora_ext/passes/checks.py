"""Checks of the passes that the host makes by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from laplace_lora_ext.models.weights import LinearRows
from laplace_lora_ext.passes.graph import (
    check_differentiable,
    check_logits,
    tapped,
)
from laplace_lora_ext.passes.recorder import Recorder


@contextmanager
def inspected(
    recorder: Recorder,
    x: Any,
    check_targets: Callable[[Tensor], object],
) -> Iterator[None]:
    """Check passes that the host makes on a batch `x` within.

    Errors are those of `Recorder.record`. What the first one returns goes to
    `check_targets`. Hooks that the host leaves behind are removed, and where it fails,
    one more pass names the reason.
    """
    model, blocks = recorder.model, recorder.blocks
    called: set[int] = set()
    differentiable: list[bool] = []

    def finished(
        _: nn.Module,
        __: tuple,
        logits: Tensor,
    ) -> None:
        check_logits(logits)
        if not differentiable:  # others may be of one example
            check_targets(logits)
        # A pass for functional derivatives, of which there may be others, has no graph
        # of its own.
        differentiable.append(logits.requires_grad)

    try:
        with _without_new_hooks(model), recorder.noting_calls(called):
            model.register_forward_hook(finished)
            yield
    except Exception as error:
        with tapped(model, blocks, recorder.layouts) as taps:
            graph = taps.run(partial(model, x))
        of_blocks = zip(blocks, graph.calls, strict=True)
        silent = [
            block.name
            for block, calls in of_blocks
            if not calls and isinstance(block.rows, LinearRows)
        ]
        if silent:
            raise RuntimeError(
                f"The batch does not use {len(silent)} of {len(blocks)} weights, such "
                f"as {silent[0]}, but the backend needs all of them in every batch. "
                "Leave such layers out with target_modules, or use "
                'hessian_structure="lowrank_kron".'
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
