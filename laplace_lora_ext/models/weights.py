"""LoRA weights as one vector, as one tensor each, and a model with others in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from laplace_lora_ext.models.lora_layers import Block
from laplace_lora_ext.undoing import removing_hooks, undoing

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
    are_plain : bool
        whether they are weights of linear layers, which nothing else depends on
    """

    def __init__(self, module: nn.Module, blocks: Sequence[Block]) -> None:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._module, self._blocks = module, blocks
        self._names = [names[id(block.weight)] for block in blocks]
        self._places = [self._place_of(name) for name in self._names]
        self.values: Values = [block.weight.detach() for block in blocks]
        self.are_plain = all(block.is_plain for block in blocks)

    def call(self, values: Values, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the module returns with these weights; its own stay as they are."""
        weights = dict(zip(self._names, values, strict=True))
        with undoing(self._put_back):  # an interrupt may keep torch from doing so
            return torch.func.functional_call(self._module, weights, args, dict(kwargs))

    def _place_of(self, name: str) -> tuple[dict[str, Any], str, Any]:
        """Where a weight is: a module's parameters, its name among them, and itself."""
        path, _, leaf = name.rpartition(".")
        parameters = self._module.get_submodule(path)._parameters
        return parameters, leaf, parameters[leaf]

    def _put_back(self) -> None:
        for parameters, name, weight in self._places:
            parameters[name] = weight

    def run(self, batch: Any, values: Values) -> Any:
        """What the module makes of a batch with these weights."""
        return self.call(values, (batch,), {})

    def call_joined(
        self, values: Values, n_rows: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """What it returns for several batches of `n_rows` in one, each with weights of its own.

        Each of the values is `(batches, m, n)`. Every layer must be given rows in this order, of
        shape `(batches * n_rows, positions, n)`; others are refused.
        """
        with removing_hooks() as handles:
            for block, weights in zip(self._blocks, values, strict=True):
                hook = partial(_map_batches, weights, n_rows)
                handles.append(block.layer.register_forward_hook(hook, prepend=True))
            return self._module(*args, **kwargs)


def _map_batches(
    weights: torch.Tensor, n_rows: int, layer: Any, args: tuple[torch.Tensor, ...], _: torch.Tensor
) -> torch.Tensor:
    """A forward hook: what a linear layer makes of each batch with weights `(m, n)` of its own."""
    rows, n_batches = args[0], len(weights)
    if rows.ndim < 3 or len(rows) != n_batches * n_rows:  # such as those that a router picks
        raise ValueError(f"A layer was given {tuple(rows.shape)}, not {n_batches * n_rows} texts.")
    products = rows.reshape(n_batches, -1, rows.shape[-1]) @ weights.mT
    products = products.reshape(*rows.shape[:-1], -1)
    return products if layer.bias is None else products + layer.bias
