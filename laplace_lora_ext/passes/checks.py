"""Checks of forward passes: LoRA layers that ran, numbers that are finite, logits with a gradient.

The library's own passes are checked by `Recording`, those that the host runs by `inspected`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import Block


@contextmanager
def noting_calls(blocks: Sequence[Block], called: set[int]) -> Iterator[None]:
    """Add to `called` the indices of blocks whose layers are called within."""

    def note(index: int, *_: Any) -> None:
        called.add(index)

    with ExitStack() as hooks:
        for index, block in enumerate(blocks):
            hooks.callback(block.layer.register_forward_hook(partial(note, index)).remove)
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


def _check_used_by_batch(blocks: Sequence[Block], used: set[int]) -> None:
    """Explain why the host failed, if the batch did not call all layers with gradients."""
    silent = [block.name for index, block in enumerate(blocks) if index not in used]
    if silent:
        raise RuntimeError(
            f"The batch does not use {len(silent)} of {len(blocks)} LoRA weights, such as "
            f"{silent[0]}, but the backend needs all of them in every batch. Leave such layers out "
            'with target_modules, or use hessian_structure="lowrank_kron".'
        )


def check_activations(block: Block, *tensors: torch.Tensor) -> None:
    """Refuse inputs or outputs of a layer that are not finite."""
    if not all(torch.isfinite(tensor).all() for tensor in tensors):
        raise ValueError(f"LoRA layer {block.name}: non-finite activations")


def name_first_bad_layer(model: LogitsModel, blocks: Sequence[Block], x: Any) -> None:
    """Run the model once more on a batch whose logits are not finite, to name the layer."""
    with _checking(model, blocks, lambda logits: None):
        model(x)


def is_finite(values: torch.Tensor) -> bool:
    """Whether all values are."""
    # A finite sum says so many times faster, which tells for logits of a vocabulary.
    return bool(torch.isfinite(values.detach().sum()) or torch.isfinite(values).all())


def check_logits(logits: torch.Tensor) -> None:
    """Refuse logits that are not finite."""
    if not is_finite(logits):
        raise ValueError(
            "non-finite logits, though every LoRA layer's activations are finite: check the layers "
            "after them, and the model's precision"
        )


def check_differentiable(*logits_require_grad: bool) -> None:
    """Refuse passes if no logits require grad."""
    if not any(logits_require_grad):
        raise RuntimeError(
            "No gradient of the logits reaches the LoRA layers: remove .detach() or "
            "torch.no_grad() from the model's forward pass."
        )


@contextmanager
def inspected(
    model: LogitsModel,
    blocks: Sequence[Block],
    x: Any,
    check_targets: Callable[[torch.Tensor], object],
) -> Iterator[None]:
    """Check passes that the host makes on a batch `x`.

    What each pass returns goes to `check_targets`. Where the host fails, the hooks that it leaves
    behind are removed, and one more pass names the reason. Errors are those of `record`.
    """
    model.try_left_padding(x)
    restore_hooks = _remember_hooks(model)
    try:
        with _checking(model, blocks, check_targets):
            yield
    except BaseException as error:
        restore_hooks()
        if isinstance(error, Exception):
            with _checking(model, blocks, check_targets) as used:
                model(x)
            _check_used_by_batch(blocks, used)
        raise


@contextmanager
def _checking(
    model: LogitsModel, blocks: Sequence[Block], check_targets: Callable[[torch.Tensor], object]
) -> Iterator[set[int]]:
    """Check all passes within; what is yielded gets the indices of blocks that carry gradients."""
    called: set[int] = set()
    used: set[int] = set()
    differentiable: list[bool] = []

    def finished_layer(index: int, _: nn.Module, args: tuple, output: torch.Tensor) -> None:
        called.add(index)
        if output.requires_grad:
            used.add(index)
        check_activations(blocks[index], args[0], output)

    def finished(_: nn.Module, __: tuple, logits: torch.Tensor) -> None:
        check_logits(logits)
        check_targets(logits)
        # A pass for functional derivatives, of which there may be others, has no graph of its own.
        differentiable.append(logits.requires_grad)

    with ExitStack() as hooks:
        hooks.callback(model.register_forward_hook(finished).remove)
        for index, block in enumerate(blocks):
            hooks.callback(block.layer.register_forward_hook(partial(finished_layer, index)).remove)
        yield used
        if called:
            check_differentiable(*differentiable)


def _remember_hooks(model: nn.Module) -> Callable[[], None]:
    """A function that removes all hooks added from now on."""
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
