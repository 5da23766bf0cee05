"""Draws of a posterior as directions from the trained weights, reproducible at any time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from laplace_lora_ext.curvature.matrix import LowRankKronDecomposed
from laplace_lora_ext.models.lora_layers import Block
from laplace_lora_ext.models.weights import Values, shaped
from laplace_lora_ext.tuning.loss_search import draw_seed


class Noise:
    """Standard normal numbers, `(parameters,)` for each draw, stored as a seed.

    Directions under two prior precisions come from the same numbers.
    """

    def __init__(self, n_samples: int, seed: int) -> None:
        self.n_samples = n_samples
        self._seed = seed

    @classmethod
    def seeded(cls, n_samples: int, generator: torch.Generator | None) -> Noise:
        """With a seed from a generator or torch's random state; 0 draws leave that untouched."""
        return cls(n_samples, draw_seed(generator) if n_samples else 0)

    def direction(
        self, index: int, precision: LowRankKronDecomposed, blocks: Sequence[Block]
    ) -> Values:
        """`P^(-1/2) z` for a draw z: a sample of the Gaussian with mean 0 and precision P."""
        generator = torch.Generator().manual_seed(self._seed + index)
        like = precision.blocks[0].small.values
        n_params = sum(block.weight.numel() for block in blocks)
        z = torch.randn(n_params, generator=generator, dtype=like.dtype).to(like.device)
        with torch.autocast(like.device.type, enabled=False):
            direction = precision.bmm(z, exponent=-0.5)
            return shaped(direction, blocks)

    def directions(
        self, precision: LowRankKronDecomposed, blocks: Sequence[Block]
    ) -> Iterator[Values]:
        """The directions of all draws, one at a time."""
        return (self.direction(index, precision, blocks) for index in range(self.n_samples))
