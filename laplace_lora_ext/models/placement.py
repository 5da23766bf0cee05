"""Where weights are: in memory, sharded over processes, or fetched for each pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from torch import nn


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


def check_in_place(layers: Sequence[Any], purpose: str) -> None:
    """Refuse sharded or offloaded LoRA weights where whole ones are needed in memory.

    `purpose` begins the message of the `NotImplementedError`.
    """
    weights = [layer.weight for layer in layers]
    if any(weight.is_meta or hasattr(weight, "full_tensor") for weight in weights):
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


def _offloading(module: nn.Module) -> AlignDevicesHook | None:
    """What fetches a module's weights before a pass, and sends them back after it."""
    hook = getattr(module, "_hf_hook", None)
    for each in hook.hooks if isinstance(hook, SequentialHook) else (hook,):
        if isinstance(each, AlignDevicesHook) and each.offload and each.weights_map is not None:
            return each
    return None
