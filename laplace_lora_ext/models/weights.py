"""Trained weights: names, places, and a model with others in their place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

Home = tuple[torch.device, torch.dtype]
"""A device, and the precision of the numbers there."""

Values = list[Tensor]
"""A matrix `(m, n)` for each block, in their order."""

Kind = Literal["lora", "head", "other"]
"""What a weight is a part of: LoRA layers, heads that were trained beside them, or
else."""

# What PEFT saves with an adapter: LoRA weights, heads, and rows of embeddings. In a
# weight's name the adapter's own name follows.
_PARTS = r"lora_\w+|modules_to_save|trainable_tokens_\w+"
_OF_ADAPTER = re.compile(rf"\.({_PARTS})\.([^.]+)")


@dataclass(frozen=True)
class View:
    """A matrix as a part of a parameter, such as an expert, or all of it reshaped."""

    shape: tuple[int, ...]  # what the parameter is reshaped to
    # Along which there are several matrices, counted from the last one.
    axis: int | None = None
    place: int = 0  # which of them it is

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Return `(m, n)`."""
        sizes = list(self.shape)
        if self.axis is not None:
            del sizes[self.axis]
        m, n = sizes
        return m, n

    def of(self, parameter: Tensor) -> Tensor:
        """Cut the matrix `(m, n)` out of a tensor of the parameter's shape."""
        reshaped = parameter.reshape(self.shape)
        return reshaped if self.axis is None else reshaped.select(self.axis, self.place)


@dataclass(frozen=True)
class Block:
    """One trained matrix `(m, n)` of an adapter, and how its rows are seen.

    A bias of m numbers is a matrix `(m, 1)`.
    """

    name: str  # of the weight, without the prefixes that wrappers add
    adapter: str
    module: nn.Module  # has the weight among its parameters
    # Whether the smaller factor is that of m, the size of the output.
    small_output: bool
    # Whether hooks on the module, which is linear, see rows: inputs, and gradients of
    # outputs. Otherwise there is the parameter's whole gradient, an example at a time.
    has_rows: bool
    # The name of PEFT's layer. The modules of one site see rows of the same examples at
    # the same places, as the two halves of a LoRA layer do.
    site: str
    owner: BaseTunerLayer | None = None  # PEFT's layer that the module is a part of
    parameter: str = "weight"  # the weight's name in the module
    view: View | None = None  # None if the parameter is the matrix
    kind: Kind = "lora"

    @cached_property
    def known_as(self) -> str:
        """Name the weight without wrappers and the adapter's name."""
        return bare_name(self.name)

    @property
    def weight(self) -> Tensor:
        """Return the parameter: it may be sharded, offloaded, or hold more matrices."""
        weight = self.module._parameters[self.parameter]
        assert weight is not None
        return weight

    def put(self, weight: Tensor) -> None:
        """Put a parameter in the weight's place."""
        parameters: dict[str, Any] = self.module._parameters
        parameters[self.parameter] = weight

    def matrix(self, parameter: Tensor) -> Tensor:
        """Cut the matrix `(m, n)` out of a tensor of the parameter's shape."""
        return parameter if self.view is None else self.view.of(parameter)

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Return `(m, n)`."""
        if self.view is not None:
            return self.view.matrix_shape
        m, n = self.weight.shape
        return m, n

    @property
    def n_params(self) -> int:
        """Count the numbers of the matrix."""
        m, n = self.shape
        return m * n

    @property
    def values(self) -> Tensor:
        """Return the matrix without a graph, gathered or fetched from where it is."""
        weight = self.weight.detach()
        gather = getattr(weight, "full_tensor", None)  # of a DTensor
        hook = _offloading(self.module) if weight.is_meta else None
        if hook is not None and hook.weights_map is not None:
            weight = hook.weights_map[self.parameter].to(hook.execution_device)
        elif gather is not None:
            weight = gather()
        return self.matrix(weight)

    @property
    def statistics_dtype(self) -> torch.dtype:
        """Choose the precision of statistics and posterior: float32 or better."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    def small_side_first(self, weights: Tensor) -> Tensor:
        """Turn `(..., m, n)` weights into `(..., r, d)`, and back."""
        return weights if self.small_output else weights.mT


# --- names ----------------------------------------------------------------------------


def strip_wrappers(name: str) -> str:
    """Drop the names that DistributedDataParallel and torch.compile put in front."""
    return re.sub(r"(^|\.)((module|_orig_mod)\.)+", r"\1", name)


def owner_of(name: str) -> str | None:
    """Return the name of a weight's adapter; None for the base model's weights."""
    match = _OF_ADAPTER.search(name)
    return None if match is None else match[2]


def without_adapter(name: str) -> str:
    """Drop the adapter's name from a weight's."""
    return _OF_ADAPTER.sub(r".\1", name)


def bare_name(name: str) -> str:
    """Name a weight as it is called without wrappers, whatever the adapters are."""
    bare = without_adapter(strip_wrappers(name))
    # Names that PEFT puts in between are there or not by the layers of another adapter.
    # Directly before a LoRA weight they tell layers around layers apart.
    bare = bare.replace(".token_adapter.base_layer.", ".")
    return re.sub(r"\.base_layer\.(?!lora_)", ".", bare)


# --- values ---------------------------------------------------------------------------


def flatten_weights(blocks: Sequence[Block], device: torch.device) -> Tensor:
    """Copy the weights into one vector, `(parameters,)`."""
    dtype = blocks[0].statistics_dtype
    return torch.cat([block.values.flatten().to(device, dtype) for block in blocks])


def check_in_place(blocks: Sequence[Block], purpose: str) -> None:
    """Refuse sharded or offloaded LoRA weights where whole ones are needed in memory.

    `purpose` begins the message of the `NotImplementedError`.
    """
    if not are_in_place(blocks):
        raise NotImplementedError(
            f"{purpose} needs whole LoRA weights in memory, but these are sharded or "
            "offloaded. Pass them to fully_shard as ignored_params, or offload modules "
            "without LoRA alone."
        )


def are_in_place(blocks: Sequence[Block]) -> bool:
    """Tell whether weights are whole and in memory, not sharded or offloaded."""
    weights = [block.weight for block in blocks]
    return not any(w.is_meta or hasattr(w, "full_tensor") for w in weights)


def values_of(blocks: Sequence[Block], weights: Tensor) -> Iterator[Values]:
    """Cut weights `(S, parameters)` into values that a model can be called with."""
    check_in_place(blocks, "A draw of the weights")
    parts = weights.split([block.n_params for block in blocks], dim=1)
    of_blocks = [
        part.unflatten(1, block.shape).to(block.weight).unbind()
        for part, block in zip(parts, blocks, strict=True)
    ]
    return map(list, zip(*of_blocks, strict=True))


def parameters_with(blocks: Sequence[Block], values: Values) -> dict[int, Tensor]:
    """Make the blocks' parameters with other values, by the `id` of each parameter.

    Where a parameter holds more matrices than those of the blocks, these keep their
    values.
    """
    parameters: dict[int, Tensor] = {}
    for block, value in zip(blocks, values, strict=True):
        weight = block.weight
        if block.view is None:
            parameters[id(weight)] = value
            continue
        if id(weight) not in parameters:
            copy = weight.detach().clone(memory_format=torch.contiguous_format)
            parameters[id(weight)] = copy
        block.matrix(parameters[id(weight)]).copy_(value)
    return parameters


@contextmanager
def replace_weights(blocks: Sequence[Block], values: Values) -> Iterator[None]:
    """Put other weights, which may have a graph, in the place of a model's within.

    Other threads must not run the model meanwhile.
    """
    others = parameters_with(blocks, values)
    before = [block.weight for block in blocks]
    try:
        for block, weight in zip(blocks, before, strict=True):
            block.put(others[id(weight)])
        yield
    finally:
        for block, weight in zip(blocks, before, strict=True):
            block.put(weight)


def read(numbers: Sequence[Tensor]) -> list[float]:
    """Return numbers `()` on any devices as Python's own.

    They are read together, since each reading from an accelerator waits for all work
    there.
    """
    here = [number.detach().to(numbers[0].device) for number in numbers]
    return torch.stack(here).tolist() if here else []


# --- devices --------------------------------------------------------------------------


def device_of(module: nn.Module) -> torch.device:
    """Return the device where a module's first parameter is, or is fetched to."""
    device = next(module.parameters()).device
    if device.type != "meta":
        return device
    for part in module.modules():
        hook = _offloading(part)
        if hook is not None and hook.execution_device is not None:
            return torch.device(hook.execution_device)
    return device


def _offloading(module: nn.Module) -> AlignDevicesHook | None:
    """Find what fetches a module's weights before a pass, if anything does."""
    hook = getattr(module, "_hf_hook", None)
    for each in hook.hooks if isinstance(hook, SequentialHook) else [hook]:
        # Without a map of its weights, a hook only moves inputs.
        if isinstance(each, AlignDevicesHook) and each.weights_map is not None:
            return each
    return None
