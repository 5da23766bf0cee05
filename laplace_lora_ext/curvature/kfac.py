"""The two ways to sum Kronecker factors from inputs and output gradients.

Pure mathematics. Shapes: B samples, T positions, S seeds, a weight `(m, n)`; inputs a
`(B, T, n)` and output gradients g `(S, B, T, m)`. Only what needs the mask of valid positions asks
for it, since the positions that a layer sees need not be the mask's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from laplace_lora_ext.curvature.block import KroneckerBlock
from laplace_lora_ext.curvature.factors import StreamingUpdates
from laplace_lora_ext.passes.derivatives import per_sample_gradients
from laplace_lora_ext.passes.recording import Rows


class KfacApprox:
    """Adds a batch's inputs and gradients to the blocks of a curvature."""

    add_inputs: Any = None  # sums an input of some blocks, where it counts apart from gradients

    def __init__(self, blocks: Sequence[KroneckerBlock], updates: StreamingUpdates) -> None:
        self.blocks = blocks
        self.updates = updates

    def add_gradients(self, rows: Rows) -> None:
        """Sum a batch's gradients of one or more seeds."""
        raise NotImplementedError


class Expand(KfacApprox):
    """`F_out = Σ_nt g gᵀ` and `F_in = Σ_nt a aᵀ / Σ_n T_n`, over valid positions.

    The setting of the paper (section 3), and KFAC-expand of Eschenhagen et al. (2023).
    """

    def add_inputs(self, indices: list[int], rows: Rows) -> None:
        inputs = _valid(rows, rows.a[None])
        for index in indices:
            block = self.blocks[index]
            self.updates.add(block.input_factor, inputs)
            block.normalizer = block.normalizer + len(inputs)

    def add_gradients(self, rows: Rows) -> None:
        g = _valid(rows, rows.g)
        # After the last attention, only the positions that the model pools have a gradient.
        self.updates.add(self.blocks[rows.index].output_factor, g[g.any(dim=1)])


class Gradient(KfacApprox):
    """`F_out = Σ G Gᵀ` and `F_in = Σ Gᵀ G / Σ ‖G‖²` with `G = Σ_t g_t a_tᵀ` of a sample and seed.

    One step of power iteration from the identity towards the Kronecker product nearest to the exact
    block (Van Loan & Pitsianis, 1993); its trace is exact. G is the weight's exact gradient, so
    padding needs no mask.
    """

    def add_gradients(self, rows: Rows) -> None:
        block = self.blocks[rows.index]
        gradients = per_sample_gradients(rows.a, rows.g).flatten(0, 1)
        self.updates.add(block.output_factor, gradients.mT.flatten(0, 1))
        energy = self.updates.add(block.input_factor, gradients.flatten(0, 1))
        block.normalizer = block.normalizer + energy


KFAC_APPROX: dict[str, type[KfacApprox]] = {"expand": Expand, "gradient": Gradient}


def _valid(rows: Rows, x: torch.Tensor) -> torch.Tensor:
    """Valid positions `(N, d)` of inputs or gradients `(S, B, T, d)`."""
    mask = rows.valid()
    return (x.flatten(1, 2) if mask is None else x[:, mask]).flatten(0, 1)
