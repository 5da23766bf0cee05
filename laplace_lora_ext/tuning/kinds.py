"""One prior precision for each kind of weight: LoRA, heads, and others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_lora_ext.models.weights import Block

# Points of a grid over several kinds, whose number is to the power of the kinds: 25 by
# 25.
_POINTS = 625


@dataclass(frozen=True, eq=False)
class Kinds:
    """Spreads numbers, one for each kind, over the blocks of these kinds.

    Attributes
    ----------
    places : torch.Tensor
        `(blocks,)`, which of the numbers each block has
    """

    places: Tensor

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> Kinds:
        """List the kinds of blocks, in the order in which they come."""
        kinds: list[str] = []
        places: list[int] = []
        for block in blocks:
            if block.kind not in kinds:
                kinds.append(block.kind)
            places.append(kinds.index(block.kind))
        return cls(torch.tensor(places))

    def __len__(self) -> int:
        return int(self.places.max()) + 1

    def spread(self, numbers: Tensor) -> Tensor:
        """Give each block the number of its kind: `(..., kinds)` to `(..., blocks)`."""
        return numbers[..., self.places.to(numbers.device)]

    def is_of(self, kind: int) -> Tensor:
        """Mark the blocks of a kind, `(blocks,)`."""
        return self.places == kind

    def grid(
        self,
        low: float,
        high: float,
        size: int,
        power: float,
    ) -> Tensor:
        """List powers of a number for each kind, in all combinations, `(T, blocks)`.

        Several kinds have fewer than `size` points each, so that there are 625 together
        at most.
        """
        n_kinds = len(self)
        if n_kinds > 1:
            root = _POINTS ** (1 / n_kinds)
            # Rounding must not make 24 of a root that is 25.
            size = min(size, int(root + 1e-9))
        axis = torch.logspace(
            low,
            high,
            size,
            base=power,
            dtype=torch.float32,
        )
        axes = [axis] * n_kinds
        points = torch.cartesian_prod(*axes)
        # Of one kind, the product is the axis itself.
        return self.spread(points.reshape(-1, n_kinds))
