"""Trained weights: their names, where they are, and a model with others in their place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from peft.tuners.lora import LoraLayer
from torch import nn

Place = tuple[torch.device, torch.dtype]
"""A device, and the precision of the numbers there."""

Values = list[torch.Tensor]
"""One tensor for each weight of the blocks, in their order, and of the weight's own shape."""

Kind = Literal["lora", "head", "other"]
"""What a weight is a part of: LoRA layers, heads that were trained beside them, or else."""

# What PEFT saves with an adapter: LoRA weights, heads, and rows of embeddings. In a weight's name
# the adapter's own name follows.
_PARTS = r"lora_\w+|modules_to_save|trainable_tokens_\w+"
_OF_ADAPTER = re.compile(rf"\.({_PARTS})\.([^.]+)")
_OF_ANY_ADAPTER = re.compile(rf"\.({_PARTS})(\.|$)")

# Every call of a posterior asks for the names of a whole model.
_MANY_NAMES = 2**16


@dataclass(frozen=True)
class LinearRows:
    """Rows that hooks on a linear layer see: its inputs, and gradients of its outputs."""

    layer: nn.Linear
    # Layers of one site see rows of the same examples at the same places, as the two halves of a
    # LoRA layer do: that layer's name.
    site: str
    of_bias: bool = False  # which is a matrix `(m, 1)` that multiplies ones

    def multiplied(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the rows `(..., n)` that the weight multiplies, of what the layer was given."""
        if self.of_bias:
            return inputs.new_ones(*inputs.shape[:-1], 1)
        return inputs


@dataclass(frozen=True)
class Block:
    """One trained matrix `(m, n)` of an adapter, and how its rows are seen.

    A bias of m numbers is a matrix `(m, 1)`.
    """

    name: str  # of the weight, without the prefixes that wrappers add
    adapter: str
    module: nn.Module  # has the weight among its parameters
    small_output: bool  # whether the smaller factor is that of m, the size of the output
    rows: LinearRows
    owner: LoraLayer | None = None  # PEFT's layer that the module is a part of
    parameter: str = "weight"  # the weight's name in the module
    kind: Kind = "lora"

    @property
    def known_as(self) -> str:
        """Name of the weight, which does not depend on wrappers and on the adapter's name."""
        return bare_name(self.name)

    @property
    def weight(self) -> torch.Tensor:
        """The parameter itself, which may be sharded or offloaded."""
        weight = getattr(self.module, self.parameter)
        assert isinstance(weight, torch.Tensor)
        return weight

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n)."""
        shape = self.weight.shape
        if len(shape) == 1:
            return shape[0], 1
        m, n = shape
        return m, n

    @property
    def values(self) -> torch.Tensor:
        """The weight without a graph, gathered or fetched from wherever it is."""
        if self.weight.is_meta:
            hook = _offloading(self.module)
            if hook is not None and hook.weights_map is not None:
                return hook.weights_map[self.parameter].to(hook.execution_device)
        weight = self.weight.detach()
        gather = getattr(weight, "full_tensor", None)  # of a DTensor
        return weight if gather is None else gather()

    @property
    def device(self) -> torch.device:
        """Where the layer computes."""
        return device_of(self.module)

    @property
    def statistics_dtype(self) -> torch.dtype:
        """What the block's statistics and posterior are held in: float32 or better."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    @property
    def place(self) -> Place:
        """Where its statistics and posterior belong, and their precision."""
        return self.device, self.statistics_dtype

    def small_side_first(self, weights: torch.Tensor) -> torch.Tensor:
        """Turn `(..., m, n)` weights into `(..., r, d)`, and back."""
        return weights if self.small_output else weights.mT


def places_of(blocks: Sequence[Block], device: torch.device) -> list[Place]:
    """Say where a posterior belongs: first what is over all blocks, then what is of each.

    The former belongs on the model's `device`.
    """
    of_all = device, blocks[0].statistics_dtype
    return [of_all, *(block.place for block in blocks)]


# --- names -----------------------------------------------------------------------------------


@lru_cache(_MANY_NAMES)
def strip_wrappers(name: str) -> str:
    """Drop the names that DistributedDataParallel and torch.compile put in front."""
    return re.sub(r"(^|\.)((module|_orig_mod)\.)+", r"\1", name)


def owner_of(name: str) -> str | None:
    """Return the adapter that a weight of this name belongs to; None for the base model's."""
    match = _OF_ADAPTER.search(name)
    return None if match is None else match[2]


def without_adapter(name: str) -> str:
    """Drop the adapter's name from a weight's."""
    return _OF_ADAPTER.sub(r".\1", name)


def is_of_base(name: str) -> bool:
    """Tell whether a weight is the base model's, by a name that `without_adapter` returned."""
    return _OF_ANY_ADAPTER.search(name) is None


@lru_cache(_MANY_NAMES)
def bare_name(name: str) -> str:
    """Name a weight as it is called without wrappers, whatever the adapters are."""
    bare = without_adapter(strip_wrappers(name))
    # Names that PEFT puts in between are there or not by the layers of another adapter.
    return bare.replace(".token_adapter.base_layer.", ".").replace(".base_layer.", ".")


# --- values ----------------------------------------------------------------------------------


def flattened(blocks: Sequence[Block], device: torch.device) -> torch.Tensor:
    """Copy the weights into one vector, `(parameters,)`."""
    dtype = blocks[0].statistics_dtype
    return torch.cat([block.values.flatten().to(device, dtype) for block in blocks])


def check_in_place(blocks: Sequence[Block], purpose: str) -> None:
    """Refuse sharded or offloaded LoRA weights where whole ones are needed in memory.

    `purpose` begins the message of the `NotImplementedError`.
    """
    for block in blocks:
        is_sharded = hasattr(block.weight, "full_tensor")
        if block.weight.is_meta or is_sharded:
            raise NotImplementedError(
                f"{purpose} needs whole LoRA weights in memory, but these are sharded or "
                "offloaded. Pass them to fully_shard as ignored_params, or offload modules without "
                "LoRA alone."
            )


def check_with_biases(blocks: Sequence[Block]) -> None:
    """Refuse weights without their layer's bias, which the host takes for a part of all of them."""
    of_blocks = {id(block.weight) for block in blocks}
    without = []
    for block in blocks:
        bias = getattr(block.module, "bias", None)
        if bias is not None and id(bias) not in of_blocks:
            without.append(block.name)
    if without:
        raise NotImplementedError(
            'hessian_structure="kron" treats weight and bias of a layer together, and the biases '
            f"of {len(without)} layers are frozen or left out, such as that of {without[0]}: use "
            '"lowrank_kron", "diag" or "full".'
        )


def called_with(
    module: nn.Module, blocks: Sequence[Block], values: Values, /, *args: Any, **kwargs: Any
) -> Any:
    """Call a module with other LoRA weights in place of its own, which stay as they are."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    weights = {names[id(block.weight)]: value for block, value in zip(blocks, values, strict=True)}
    return torch.func.functional_call(module, weights, args, kwargs)


def read(numbers: Sequence[torch.Tensor]) -> list[float]:
    """Return numbers `()` on any devices as Python's own.

    They are read together, since each reading from an accelerator waits for all work there.
    """
    if not numbers:
        return []
    device = numbers[0].device
    return torch.stack([number.detach().to(device) for number in numbers]).tolist()


# --- devices ---------------------------------------------------------------------------------


def device_of(module: nn.Module) -> torch.device:
    """Return where a module computes: where its first parameter is, or is fetched to."""
    device = next(module.parameters()).device
    if device.type != "meta":
        return device
    for part in module.modules():
        hook = _offloading(part)
        if hook is not None and hook.execution_device is not None:
            return torch.device(hook.execution_device)
    return device


def _offloading(module: nn.Module) -> AlignDevicesHook | None:
    """Find what fetches a module's weights before a pass, and sends them back after it."""
    hook = getattr(module, "_hf_hook", None)
    hooks = hook.hooks if isinstance(hook, SequentialHook) else [hook]
    for each in hooks:
        if isinstance(each, AlignDevicesHook) and each.offload and each.weights_map is not None:
            return each
    return None
