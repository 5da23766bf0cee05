"""Draws of a posterior as directions from the trained weights, the same ones whenever asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from laplace_lora_ext.curvature.matrix import LowRankKronDecomposed
from laplace_lora_ext.models.lora_layers import Block
from laplace_lora_ext.tuning.loss_search import draw_seed

Values = list[torch.Tensor]
"""One tensor a LoRA weight, in the order and of the shape of the blocks'."""


class LoRAWeights:
    """The LoRA weights of a module, and calls of it with others in their place.

    Parameters
    ----------
    module : torch.nn.Module
        that holds the blocks' weights
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


class Noise:
    """Standard normal numbers, `(parameters,)` a draw, kept as a seed and made anew each time.

    The directions of two prior precisions differ by the prior precision alone.
    """

    def __init__(self, n_samples: int, seed: int) -> None:
        self.n_samples = n_samples
        self._seed = seed

    @classmethod
    def seeded(cls, n_samples: int, generator: torch.Generator | None) -> Noise:
        """With a seed from a generator, or torch's random state, which no draws leave alone."""
        return cls(n_samples, draw_seed(generator) if n_samples else 0)

    def direction(
        self, index: int, precision: LowRankKronDecomposed, blocks: Sequence[Block]
    ) -> Values:
        """`P^(-1/2) z` of a draw z: from a Gaussian of mean 0 and precision P."""
        generator = torch.Generator().manual_seed(self._seed + index)
        like = precision.blocks[0].small.values
        sizes = [block.weight.numel() for block in blocks]
        z = torch.randn(sum(sizes), generator=generator, dtype=like.dtype).to(like.device)
        with torch.autocast(like.device.type, enabled=False):
            parts = precision.bmm(z, exponent=-0.5).split(sizes)
        return [
            part.reshape(block.weight.shape).to(block.weight.device)
            for part, block in zip(parts, blocks, strict=True)
        ]

    def directions(
        self, precision: LowRankKronDecomposed, blocks: Sequence[Block]
    ) -> Iterator[Values]:
        """Those of all draws, one at a time."""
        return (self.direction(index, precision, blocks) for index in range(self.n_samples))
