"""How much each LoRA weight of a model contributes to the variance of its predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from laplace_lora_ext.models.lora_layers import Block


@dataclass(frozen=True)
class VarianceShares:
    """Each LoRA weight's share of the logits' variance (the trace of their covariance).

    Each mapping sums to 1, and has the order of the model's parameters.

    Attributes
    ----------
    by_block : dict of str to float
        for each LoRA weight, by its name
    by_layer : dict of str to float
        for each transformer layer, such as "model.layers.3", and each module outside the layers,
        such as "lm_head"
    by_matrix : dict of str to float
        for all "lora_A" and for all "lora_B" weights
    """

    by_block: dict[str, float]
    by_layer: dict[str, float]
    by_matrix: dict[str, float]

    @classmethod
    def of(cls, blocks: Sequence[Block], variances: torch.Tensor) -> VarianceShares:
        """Divide the variances of the blocks, `(blocks,)`, by their sum."""
        total = variances.sum()
        if not total > 0:
            raise ValueError("The logits have no variance: they don't depend on any LoRA weight.")
        shares = (variances / total).tolist()

        def grouped(name: Callable[[Block], str]) -> dict[str, float]:
            groups: dict[str, float] = {}
            for block, share in zip(blocks, shares, strict=True):
                groups[name(block)] = groups.get(name(block), 0.0) + share
            return groups

        return cls(
            by_block=grouped(lambda block: block.name),
            by_layer=grouped(lambda block: block.transformer_layer),
            by_matrix=grouped(lambda block: block.matrix),
        )
