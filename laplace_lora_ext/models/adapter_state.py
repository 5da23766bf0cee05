"""Whether a model is still the one that a posterior was fitted to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from laplace_lora_ext.models.lora_layers import Block


def check_runs(blocks: Sequence[Block]) -> None:
    """Refuse a model whose adapter is merged, disabled or not active (`RuntimeError`)."""
    for block in blocks:
        owner = block.owner
        if owner is None:
            continue
        if owner.merged:
            raise RuntimeError(
                f"LoRA layer {block.name} is merged into the base model: call "
                "model.unmerge_adapter() first."
            )
        if owner.disable_adapters:
            raise RuntimeError(
                f"LoRA layer {block.name} is disabled: call model.enable_adapter_layers()."
            )
        if block.adapter not in owner.active_adapters:
            raise RuntimeError(
                f"The posterior is over the adapter {block.adapter!r}, which is not active in "
                f"LoRA layer {block.name}: call model.set_adapter({block.adapter!r})."
            )


def scalings(blocks: Sequence[Block]) -> list[float | None]:
    """The factor by which each block's LoRA layer scales its output; None without an owner."""
    return [
        None if block.owner is None else float(block.owner.scaling[block.adapter])
        for block in blocks
    ]


def fingerprint(blocks: Sequence[Block]) -> str:
    """A hash of the blocks' names, values and scalings.

    It does not depend on the adapter's name or the weights' device, nor on their data type as long
    as the values are the same.
    """
    digest = hashlib.sha256()
    for block, scaling in zip(blocks, scalings(blocks), strict=True):
        name = f"{block.lora_layer}.{block.parameter}"
        values = block.values.double().cpu().contiguous()
        digest.update(repr((name, tuple(values.shape), scaling)).encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def check_unchanged(blocks: Sequence[Block], mean: torch.Tensor) -> None:
    """Refuse a model whose LoRA weights differ from `mean`, those of the fit.

    `mean`, `(parameters,)`, is compared in the weights' present precision. The message of the
    `RuntimeError` names the first layer that differs.
    """
    parts = mean.split([block.weight.numel() for block in blocks])
    for block, part in zip(blocks, parts, strict=True):
        values = block.values.flatten()
        if not torch.equal(values, part.to(values)):
            raise RuntimeError(
                f"The weights of LoRA layer {block.name} have changed since the fit: fit again, or "
                "load the weights of the fit."
            )
