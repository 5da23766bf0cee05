"""Which LoRA layers take part, which can't, and where their weights are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from peft import LoraConfig
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from torch import nn

from laplace_lora_ext.messages import listed

Layers = Mapping[str, lora.LoraLayer]
"""PEFT's layers by their names."""

_DORA = "DoraLinearVariant"

# Linear `lora_A` and `lora_B` by type, yet not applied as `B(A(x))`.
_NOT_PLAIN = tuple(
    getattr(lora.layer, name)
    for name in ("MultiheadAttention", "ParamWrapper")
    if hasattr(lora.layer, name)
)


def adapters_of(layer: lora.LoraLayer) -> set[str]:
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


def active_adapter(layers: Layers) -> str:
    """The one adapter that runs in a forward pass.

    Raises
    ------
    ValueError
        If a layer is merged or disabled, or not just one adapter is active.
    """
    idle = find_idle(layers)
    if idle is not None:
        raise ValueError(idle)
    active = {a for la in layers.values() for a in la.active_adapters if a in adapters_of(la)}
    if len(active) != 1:
        state = f"Several adapters are active ({', '.join(sorted(active))})"
        raise ValueError(
            f"{state if active else 'No adapter is active'}: call model.set_adapter(name)."
        )
    return active.pop()


def select(
    layers: Layers,
    target_modules: str | Sequence[str] | None,
    layers_to_transform: int | Iterable[int] | None,
) -> Layers:
    """Those of some layers that `peft.LoraConfig` would choose, by name; an error if none."""
    if target_modules is None and layers_to_transform is None:
        return layers
    indices = layers_to_transform
    if indices is not None and not isinstance(indices, int):
        indices = list(indices)
    if isinstance(target_modules, str):
        targets: str | list[str] = target_modules
    elif target_modules is not None:
        targets = list(target_modules)
    else:  # PEFT reads layer indices only beside names of modules
        targets = sorted({name.rpartition(".")[2] for name in layers})
    config = LoraConfig(target_modules=targets, layers_to_transform=indices)
    # Before a name in full, PEFT would pass over the layer's index: let it see but ends of names.
    dot = "" if isinstance(targets, str) else "."
    selected = {
        name: layer
        for name, layer in layers.items()
        if check_target_module_exists(config, dot + name) and indices != []
    }
    if not selected:
        raise ValueError(
            f"No LoRA layer matches target_modules={target_modules!r}, "
            f"layers_to_transform={layers_to_transform!r}; there are {listed(list(layers))}."
        )
    return selected


# --- layers that can't take part -----------------------------------------------------------------


def other_tuners(model: nn.Module) -> str:
    """What a model without LoRA layers has in their place, for an error message."""
    found = {type(m).__name__ for m in model.modules() if isinstance(m, BaseTunerLayer)}
    for config in getattr(model, "peft_config", {}).values():
        found.add(str(getattr(config.peft_type, "value", config.peft_type)))
    return ", ".join(sorted(found)) or "no adapter at all"


def check_plain(layers: Layers, adapter: str) -> None:
    """Refuse layers that do not add `B(A(x))` with linear A and B of their own.

    Raises
    ------
    NotImplementedError
        The message lists them.
    """
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
    addresses = {
        f"{name}.{part}": half.weight.data_ptr()
        for name, layer in layers.items()
        for part, half in zip(("lora_A", "lora_B"), _halves(layer, adapter), strict=True)
        if not is_elsewhere(half.weight)
    }
    counts = Counter(addresses.values())
    shared = [name for name, address in addresses.items() if counts[address] > 1]
    if shared:
        raise NotImplementedError(
            f"LoRA weights share their storage: {listed(shared)}. Give each its own parameter, "
            "without PEFT's ensure_weight_tying."
        )


def has_dora(layer: lora.LoraLayer, adapter: str) -> bool:
    """Whether a linear layer has DoRA, which scales what it returns by a magnitude over a norm.

    The norm is no part of the derivative: PEFT detaches it, as the DoRA paper does (section 4.3).
    """
    return _variant(layer, adapter) == _DORA


def is_convolution(layer: Any) -> bool:
    """Whether a layer is a convolution in one or two dimensions that patches describe."""
    return type(layer) in (nn.Conv1d, nn.Conv2d) and layer.groups == 1


def _is_plain(layer: lora.LoraLayer, adapter: str) -> bool:
    if isinstance(layer, _NOT_PLAIN) or adapter not in layer.lora_A or adapter not in layer.lora_B:
        return False
    halves, variant = _halves(layer, adapter), _variant(layer, adapter)
    if not all(isinstance(getattr(half, "weight", None), nn.Parameter) for half in halves):
        return False  # such as weights that are computed from parameters
    if all(type(half) is nn.Linear for half in halves):
        return variant in ("", _DORA)
    return not variant and all(map(is_convolution, halves))


def _halves(layer: lora.LoraLayer, adapter: str) -> list[Any]:
    return [layer.lora_A[adapter], layer.lora_B[adapter]]


def _variant(layer: lora.LoraLayer, adapter: str) -> str:
    """The kind of LoRA, such as "AloraLinearVariant"; "" for plain LoRA."""
    variant = getattr(layer, "lora_variant", {}).get(adapter)
    if variant is not None:
        return type(variant).__name__
    return _DORA if getattr(layer, "use_dora", {}).get(adapter) else ""  # of older PEFT


# --- weights that are elsewhere ------------------------------------------------------------------


def values_of(layer: Any) -> torch.Tensor:
    """The weight of a layer without a graph, gathered or fetched from wherever it is."""
    hook = _offloading(layer)
    if layer.weight.is_meta and hook is not None:
        return hook.weights_map["weight"].to(hook.execution_device)  # pyright: ignore[reportOptionalSubscript]
    weight: Any = layer.weight.detach()
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes: where its first parameter is, or is fetched to."""
    device = next(module.parameters()).device
    if device.type != "meta":
        return device
    hooks = (_offloading(each) for each in module.modules())
    return next((torch.device(hook.execution_device) for hook in hooks if hook), device)  # pyright: ignore[reportArgumentType]


def is_absent(layer: Any) -> bool:
    """Whether a layer's weight is missing: it is on the meta device, and no hook fetches it."""
    return layer.weight.is_meta and _offloading(layer) is None


def is_elsewhere(weight: torch.Tensor) -> bool:
    """Whether a weight is sharded or offloaded: its numbers are not all in it."""
    return weight.is_meta or hasattr(weight, "full_tensor")


def check_in_place(layers: Sequence[Any], purpose: str) -> None:
    """Refuse sharded or offloaded LoRA weights where whole ones are needed in memory.

    `purpose` begins the message of the `NotImplementedError`.
    """
    if any(is_elsewhere(layer.weight) for layer in layers):
        raise NotImplementedError(
            f"{purpose} needs whole LoRA weights in memory, but these are sharded or offloaded. "
            "Pass them to fully_shard as ignored_params, or offload modules without LoRA alone."
        )


def check_reachable(model: nn.Module) -> None:
    """Refuse FSDP1 and ZeRO-3, which hide weights from their modules (`NotImplementedError`)."""
    is_fsdp1 = any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules())
    if is_fsdp1 or any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise NotImplementedError(
            "FSDP1 and DeepSpeed ZeRO-3 hide LoRA weights from their layers: shard with "
            "fully_shard (FSDP2), or load the adapter without them."
        )


def check_float64(device: torch.device) -> None:
    """Refuse MPS, which lacks float64 (`NotImplementedError`)."""
    if device.type == "mps":
        raise NotImplementedError(
            "The posterior keeps its sums in float64, which MPS lacks: move the model with "
            'model.to("cpu").'
        )


def _offloading(module: nn.Module) -> AlignDevicesHook | None:
    """What fetches a module's weights before a pass, and sends them back after it."""
    hook = getattr(module, "_hf_hook", None)
    for each in hook.hooks if isinstance(hook, SequentialHook) else (hook,):
        if isinstance(each, AlignDevicesHook) and each.offload and each.weights_map is not None:
            return each
    return None
