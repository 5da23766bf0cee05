"""LoRA weights as one vector, as one tensor each, and a model with others in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from laplace_lora_ext.models.lora_layers import Block

Values = list[torch.Tensor]
"""One tensor for each LoRA weight, in the order and shapes of the blocks."""


def flattened(blocks: Sequence[Block], device: torch.device) -> torch.Tensor:
    """A copy of the weights as one vector, `(parameters,)`."""
    dtype = blocks[0].statistics_dtype
    return torch.cat([block.values.flatten().to(device, dtype) for block in blocks])


def shaped(vector: torch.Tensor, blocks: Sequence[Block]) -> Values:
    """`(parameters,)` numbers as one tensor for each LoRA weight, on the weight's device."""
    parts = vector.split([block.weight.numel() for block in blocks])
    return [
        part.reshape(block.weight.shape).to(block.weight.device)
        for part, block in zip(parts, blocks, strict=True)
    ]


class LoRAWeights:
    """The LoRA weights of a module, and calls of it with others in their place.

    Parameters
    ----------
    module : torch.nn.Module
        holds the blocks' weights
    blocks : sequence of Block

    Attributes
    ----------
    values : list of torch.Tensor
        the trained weights
    """

    def __init__(self, module: nn.Module, blocks: Sequence[Block]) -> None:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._module = module
        self._names = [names[id(block.weight)] for block in blocks]
        self.values: Values = [block.weight.detach() for block in blocks]

    def call(self, values: Values, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the module returns with these weights; its own stay as they are."""
        weights = dict(zip(self._names, values, strict=True))
        return torch.func.functional_call(self._module, weights, args, dict(kwargs))

    def run(self, batch: Any, values: Values) -> Any:
        """What the module makes of a batch with these weights."""
        return self.call(values, (batch,), {})
