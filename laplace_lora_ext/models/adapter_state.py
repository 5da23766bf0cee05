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
from laplace_lora_ext.readings import read


def check_runs(model: LogitsModel, blocks: Sequence[Block]) -> None:
    """Refuse a model whose LoRA layers are merged, disabled or gone, by a `RuntimeError`."""
    present: set[int] = set()
    for name, module in model.model.named_modules():
        present.update(map(id, module._parameters.values()))
        if isinstance(module, lora.LoraLayer):
            _check_layer(strip_wrappers(name), module)
    gone = [block.name for block in blocks if id(block.weight) not in present]
    if gone:
        raise RuntimeError(
            f"LoRA weights that the posterior is over are no longer in the model: {listed(gone)}. "
            "Make a new posterior of the model as it is now."
        )


def _check_layer(name: str, layer: lora.LoraLayer) -> None:
    if layer.merged:
        raise RuntimeError(
            f"LoRA layer {name} is merged into the base model: call model.unmerge_adapter() first."
        )
    if layer.disable_adapters:
        raise RuntimeError(f"LoRA layer {name} is disabled: call model.enable_adapter_layers().")


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
        name = f"{block.lora_layer}.{block.matrix}"
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
