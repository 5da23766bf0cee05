"""LoRA weights: where they are, as one vector, and a model with others in their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from torch import nn

Values = list[torch.Tensor]
"""One tensor for each LoRA weight, in the order and shapes of the blocks."""


@dataclass(frozen=True)
class Block:
    """One LoRA weight matrix `(m, n)`: that of a linear layer."""

    lora_layer: str  # its name, without the prefixes that wrappers add
    matrix: str  # "lora_A" or "lora_B"
    adapter: str
    layer: nn.Linear
    owner: Any = None  # PEFT's layer of that name

    @property
    def name(self) -> str:
        """Of the weight."""
        return f"{self.lora_layer}.{self.matrix}.{self.adapter}.weight"

    @property
    def small_output(self) -> bool:
        """Whether the LoRA rank is the size of the layer's output or of its input."""
        return self.matrix == "lora_A"

    @property
    def weight(self) -> torch.Tensor:
        return self.layer.weight

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n)."""
        return self.layer.out_features, self.layer.in_features

    @property
    def values(self) -> torch.Tensor:
        """The weight without a graph, gathered or fetched from wherever it is."""
        layer: Any = self.layer
        hook = _offloading(layer)
        if layer.weight.is_meta and hook is not None:
            return hook.weights_map["weight"].to(hook.execution_device)  # pyright: ignore[reportOptionalSubscript]
        weight: Any = layer.weight.detach()
        return weight.full_tensor() if hasattr(weight, "full_tensor") else weight

    @property
    def device(self) -> torch.device:
        """Where the layer computes."""
        return device_of(self.layer)

    def small_side_first(self, weights: torch.Tensor) -> torch.Tensor:
        """`(..., m, n)` weights as `(..., r, d)`, and back."""
        return weights if self.small_output else weights.mT

    @property
    def statistics_dtype(self) -> torch.dtype:
        """What the block's statistics and posterior are held in: float32 or better."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    @property
    def place(self) -> tuple[torch.device, torch.dtype]:
        """Where its statistics and posterior belong, and their precision."""
        return self.device, self.statistics_dtype


def flattened(blocks: Sequence[Block], device: torch.device) -> torch.Tensor:
    """A copy of the weights as one vector, `(parameters,)`."""
    dtype = blocks[0].statistics_dtype
    return torch.cat([block.values.flatten().to(device, dtype) for block in blocks])


def check_in_place(blocks: Sequence[Block], purpose: str) -> None:
    """Refuse sharded or offloaded LoRA weights where whole ones are needed in memory.

    `purpose` begins the message of the `NotImplementedError`.
    """
    if any(b.weight.is_meta or hasattr(b.weight, "full_tensor") for b in blocks):
        raise NotImplementedError(
            f"{purpose} needs whole LoRA weights in memory, but these are sharded or offloaded. "
            "Pass them to fully_shard as ignored_params, or offload modules without LoRA alone."
        )


def called_with(
    module: nn.Module, blocks: Sequence[Block], values: Values, /, *args: Any, **kwargs: Any
) -> Any:
    """What a module returns with other LoRA weights; its own stay as they are."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    weights = {names[id(b.weight)]: value for b, value in zip(blocks, values, strict=True)}
    return torch.func.functional_call(module, weights, args, kwargs)


def read(numbers: Sequence[torch.Tensor]) -> list[float]:
    """Numbers `()` on any devices as Python's own.

    They are read together, since each reading from an accelerator waits for all work there.
    """
    alike = [number.detach().to(numbers[0].device) for number in numbers]
    return torch.stack(alike).tolist() if alike else []


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes: where its first parameter is, or is fetched to."""
    device = next(module.parameters()).device
    if device.type != "meta":
        return device
    hooks = (_offloading(each) for each in module.modules())
    return next((torch.device(hook.execution_device) for hook in hooks if hook), device)  # pyright: ignore[reportArgumentType]


def _offloading(module: nn.Module) -> AlignDevicesHook | None:
    """What fetches a module's weights before a pass, and sends them back after it."""
    hook = getattr(module, "_hf_hook", None)
    for each in hook.hooks if isinstance(hook, SequentialHook) else (hook,):
        if isinstance(each, AlignDevicesHook) and each.offload and each.weights_map is not None:
            return each
    return None
