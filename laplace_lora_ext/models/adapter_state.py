"""Whether a model is still the one that a posterior was fitted to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from peft.tuners import lora
from torch import nn

from laplace_lora_ext.messages import listed
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import Block, strip_wrappers
from laplace_lora_ext.models.selection import adapters_of
from laplace_lora_ext.readings import read


def check_runs(model: LogitsModel, blocks: Sequence[Block]) -> None:
    """Refuse a model that does not run with the blocks' adapter, and with it alone.

    A `RuntimeError` if LoRA layers are merged, disabled or gone, the adapter is not active
    somewhere, or another one is.
    """
    adapter, present = blocks[0].adapter, set()
    for name, module in model.model.named_modules():
        present.update(map(id, module._parameters.values()))
        if isinstance(module, lora.LoraLayer):
            _check_layer(strip_wrappers(name), module, adapter)
    gone = [block.name for block in blocks if id(block.weight) not in present]
    if gone:
        raise RuntimeError(
            f"LoRA weights that the posterior is over are no longer in the model: {listed(gone)}. "
            "Make a new posterior of the model as it is now."
        )


def _check_layer(name: str, layer: lora.LoraLayer, adapter: str) -> None:
    if layer.merged:
        raise RuntimeError(
            f"LoRA layer {name} is merged into the base model: call model.unmerge_adapter() first."
        )
    if layer.disable_adapters:
        raise RuntimeError(f"LoRA layer {name} is disabled: call model.enable_adapter_layers().")
    here = adapters_of(layer)
    active = here & set(layer.active_adapters)
    if adapter in here - active:
        raise RuntimeError(
            f"The posterior is over the adapter {adapter!r}, which is not active in LoRA layer "
            f"{name}: call model.set_adapter({adapter!r})."
        )
    if active - {adapter}:
        raise RuntimeError(
            f"The posterior is over the adapter {adapter!r} alone, but in LoRA layer {name} "
            f"{listed(sorted(active - {adapter}))} is active: call model.set_adapter({adapter!r})."
        )


def scalings(blocks: Sequence[Block]) -> list[float | None]:
    """The factor by which each block's LoRA layer scales its output; None without an owner."""
    return [
        None if block.owner is None else float(block.owner.scaling[block.adapter])
        for block in blocks
    ]


def scalings_in(model: nn.Module, adapter: str) -> dict[str, float]:
    """That of every LoRA layer of an adapter, by the layer's name, in the posterior or not."""
    return {
        strip_wrappers(name): float(layer.scaling[adapter])
        for name, layer in model.named_modules()
        if isinstance(layer, lora.LoraLayer) and adapter in layer.scaling
    }


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
    pairs = zip((block.values.flatten() for block in blocks), parts, strict=True)
    differ = read([(values != part.to(values)).any() for values, part in pairs])
    if any(differ):
        raise RuntimeError(
            f"The weights of LoRA layer {blocks[differ.index(True)].name} have changed since the "
            "fit: fit again, or load the weights of the fit."
        )
