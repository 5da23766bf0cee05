"""LoRA weights that a posterior is over: found in a model, selected, or refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from peft import LoraConfig
from peft.tuners import lora
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn

from laplace_lora_ext.messages import listed, warn
from laplace_lora_ext.models.weights import Block

Layers = Mapping[str, lora.LoraLayer]
"""PEFT's layers by their names."""

_NAME = re.compile(r".*\.lora_[AB]\.[^.]+\.weight")

# It scales what a layer returns by a magnitude over a norm, which is no part of the derivative:
# PEFT detaches it, as the DoRA paper does (section 4.3).
_DORA = "DoraLinearVariant"

# Linear `lora_A` and `lora_B` by type, yet not applied as `B(A(x))`.
_NOT_PLAIN = tuple(
    getattr(lora.layer, name)
    for name in ("MultiheadAttention", "ParamWrapper")
    if hasattr(lora.layer, name)
)


def find_blocks(
    model: nn.Module,
    target_modules: str | Sequence[str] | None = None,
    layers_to_transform: int | Iterable[int] | None = None,
) -> list[Block]:
    """LoRA weights of the active adapter, in the order of the model's parameters.

    Of a layer that was trained with one of its weights frozen, as LoRA-FA freezes `lora_A`, the
    other one takes part alone. An adapter that was loaded for inference has both frozen, and both
    take part. `target_modules` and `layers_to_transform` select layers as in `peft.LoraConfig`.

    A `ValueError` if there is no LoRA layer, if the adapter is merged, disabled or not the only
    active one, or if nothing matches the selection. A `NotImplementedError` if layers do not add
    `B(A(x))` with weights of their own, and for FSDP1 and DeepSpeed ZeRO-3.
    """
    _check_reachable(model)
    layers: Layers = {
        strip_wrappers(name): module
        for name, module in model.named_modules()
        if isinstance(module, lora.LoraLayer)
    }
    if not layers:
        kinds = [c.peft_type for c in getattr(model, "peft_config", {}).values()]
        there_is = listed([str(getattr(kind, "value", kind)) for kind in kinds]) or "no adapter"
        raise ValueError(
            f"No LoRA layer in the model (found {there_is}). Add one, or load one not merged."
        )
    adapter = _active_adapter(layers)
    layers = {name: layer for name, layer in layers.items() if adapter in _adapters_of(layer)}
    layers = _selected(layers, target_modules, layers_to_transform)
    _check_plain(layers, adapter)
    blocks: list[Block] = []
    for name, layer in layers.items():
        halves: Any = ("lora_A", layer.lora_A[adapter]), ("lora_B", layer.lora_B[adapter])
        both = [Block(name, matrix, adapter, half, layer) for matrix, half in halves]
        blocks += [block for block in both if block.weight.requires_grad] or both
    if len({id(block.weight) for block in blocks}) < len(blocks):
        raise NotImplementedError("LoRA layers share weights: give each its own parameters.")
    return blocks


def check_known_to_host(blocks: Sequence[Block]) -> None:
    """Refuse DoRA for the host's backends, which take every call of a layer for an input."""
    with_dora = [b.name for b in blocks if b.owner and _variant(b.owner, b.adapter) == _DORA]
    if with_dora:
        raise NotImplementedError(
            "laplace-torch's backends don't support DoRA, which calls LoRA layers with more than "
            f'their inputs: {listed(with_dora)}. Use the structures "lowrank_kron", "diag" or '
            '"full", without `backend`.'
        )


def is_untrained(blocks: Sequence[Block]) -> bool:
    """Whether all `lora_B` are 0, as PEFT initialises them."""
    of_b = [block for block in blocks if block.matrix == "lora_B"]
    return bool(of_b) and not any(block.values.any() for block in of_b)


def warn_of_other_trainable(model: nn.Module) -> None:
    """Warn of trainable parameters that are neither LoRA weights nor a head, and so stay fixed."""
    weights = {strip_wrappers(name): p for name, p in model.named_parameters() if p.requires_grad}
    bare = [name for name in weights if not _NAME.fullmatch(name)]
    names = [name for name in bare if ".modules_to_save." not in name]
    if names:
        warn(
            "The posterior is over lora_A and lora_B weights alone. Other trainable weights stay "
            f"at their MAP values: {listed(names)}."
        )


@lru_cache(2**16)  # every call of a posterior asks for the names of a whole model
def strip_wrappers(name: str) -> str:
    """Drop the names that DistributedDataParallel and torch.compile put in front."""
    return re.sub(r"(^|\.)((module|_orig_mod)\.)+", r"\1", name)


def _adapters_of(layer: lora.LoraLayer) -> set[str]:
    """Names of all adapters that have weights in the layer."""
    return {name for part in layer.adapter_layer_names for name in getattr(layer, part, ())}


def find_idle(layers: Layers) -> str | None:
    """A LoRA layer that takes no part in passes, as a sentence; None if there is none."""
    for name, layer in layers.items():
        if layer.merged:
            return (
                f"LoRA layer {name} is merged into the base model: call model.unmerge_adapter() "
                "first."
            )
        if layer.disable_adapters:
            return f"LoRA layer {name} is disabled: call model.enable_adapter_layers()."
    return None


def _check_reachable(model: nn.Module) -> None:
    """Refuse FSDP1 and ZeRO-3, which hide weights from their modules (`NotImplementedError`)."""
    is_fsdp1 = any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules())
    if is_fsdp1 or any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise NotImplementedError(
            "FSDP1 and DeepSpeed ZeRO-3 hide LoRA weights from their layers: shard with "
            "fully_shard (FSDP2), or load the adapter without them."
        )


def _active_adapter(layers: Layers) -> str:
    """The one adapter that runs in a forward pass; a `ValueError` if it is not the only one."""
    idle = find_idle(layers)
    if idle is not None:
        raise ValueError(idle)
    active = {a for la in layers.values() for a in la.active_adapters if a in _adapters_of(la)}
    if len(active) != 1:
        state = f"Several adapters are active ({', '.join(sorted(active))})"
        raise ValueError(
            f"{state if active else 'No adapter is active'}: call model.set_adapter(name)."
        )
    return active.pop()


def _selected(
    layers: Layers,
    target_modules: str | Sequence[str] | None,
    layers_to_transform: int | Iterable[int] | None,
) -> Layers:
    """Those of some layers that `peft.LoraConfig` would choose, by name; an error if none."""
    if target_modules is None and layers_to_transform is None:
        return layers
    targets: Any = target_modules
    if targets is None:  # PEFT reads layer indices only beside names of modules
        targets = sorted({name.rpartition(".")[2] for name in layers})
    indices: Any = layers_to_transform
    if indices is not None and not isinstance(indices, int):
        indices = list(indices)
    config = LoraConfig(target_modules=targets, layers_to_transform=indices)
    # Before a name in full, PEFT would pass over the layer's index: let it see but ends of names.
    dot = "" if isinstance(targets, str) else "."
    selected = {
        name: layer
        for name, layer in layers.items()
        if check_target_module_exists(config, dot + name)
    }
    if not selected:
        raise ValueError(
            f"No LoRA layer matches target_modules={target_modules!r}, "
            f"layers_to_transform={layers_to_transform!r}; there are {listed(list(layers))}."
        )
    return selected


def _check_plain(layers: Layers, adapter: str) -> None:
    """Refuse layers that do not add `B(A(x))` with linear A and B of their own."""
    unsupported = [
        f"{name} ({type(layer).__name__} {_variant(layer, adapter)}".strip() + ")"
        for name, layer in layers.items()
        if not _is_plain(layer, adapter)
    ]
    if unsupported:
        raise NotImplementedError(
            "LoRA layers must add B(A(x)), where A and B are linear and their weights parameters. "
            f"These do not: {listed(unsupported)}. Leave them out with target_modules."
        )


def _is_plain(layer: lora.LoraLayer, adapter: str) -> bool:
    if isinstance(layer, _NOT_PLAIN) or adapter not in layer.lora_A or adapter not in layer.lora_B:
        return False
    halves: list[Any] = [layer.lora_A[adapter], layer.lora_B[adapter]]
    # Pruning, among others, computes weights from parameters.
    are_linear = all(type(x) is nn.Linear and isinstance(x.weight, nn.Parameter) for x in halves)
    return are_linear and _variant(layer, adapter) in ("", _DORA)


def _variant(layer: lora.LoraLayer, adapter: str) -> str:
    """The kind of LoRA, such as "AloraLinearVariant"; "" for plain LoRA."""
    variant = getattr(layer, "lora_variant", {}).get(adapter)
    if variant is not None:
        return type(variant).__name__
    return _DORA if getattr(layer, "use_dora", {}).get(adapter) else ""  # of older PEFT
