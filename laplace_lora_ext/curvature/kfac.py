"""The three ways to sum Kronecker factors from inputs and output gradients.

Pure mathematics. Shapes: B samples, T positions, S seeds, a weight `(m, n)`; inputs a
`(B, T, n)` and output gradients g `(S, B, T, m)`. Only what needs the mask of valid positions asks
for it, since the positions that a layer sees need not be the mask's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from laplace_lora_ext.curvature.block import KroneckerBlock
from laplace_lora_ext.curvature.factors import StreamingUpdates
from laplace_lora_ext.passes.derivatives import per_sample_gradients
from laplace_lora_ext.passes.recording import Rows


class KfacApprox:
    """Adds a batch's inputs and gradients to the blocks of a curvature."""

    uses_inputs: ClassVar[bool] = True  # by themselves, apart from their gradients

    def __init__(self, blocks: Sequence[KroneckerBlock], updates: StreamingUpdates) -> None:
        self.blocks = blocks
        self.updates = updates

    def add_inputs(self, indices: list[int], rows: Rows) -> None:
        """Sum an input of one or more blocks."""
        inputs = self._rows(rows.a[None], rows.valid())
        for index in indices:
            block = self.blocks[index]
            self.updates.add(block.input_factor, inputs)
            block.normalizer = block.normalizer + len(inputs)

    def add_gradients(self, rows: Rows) -> None:
        """Sum a batch's gradients of one or more seeds."""
        g = self._rows(rows.g, rows.valid())
        # After the last attention, only the positions that the model pools have a gradient.
        self.updates.add(self.blocks[rows.index].output_factor, g[g.any(dim=1)])

    def _rows(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Rows `(N, d)` for a factor, of `(S, B, T, d)`."""
        raise NotImplementedError


class Expand(KfacApprox):
    """`F_out = Σ_nt g gᵀ` and `F_in = Σ_nt a aᵀ / Σ_n T_n`, over valid positions.

    The setting of the paper (section 3), and KFAC-expand of Eschenhagen et al. (2023).
    """

    def _rows(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return (x.flatten(1, 2) if mask is None else x[:, mask]).flatten(0, 1)


class Reduce(KfacApprox):
    """`F_out = Σ_n (Σ_t g) (Σ_t g)ᵀ` and `F_in = Σ_n ā āᵀ / N` with ā the mean of valid positions.

    KFAC-reduce of Eschenhagen et al. (2023).
    """

    def add_inputs(self, indices: list[int], rows: Rows) -> None:
        mask = rows.valid()
        n_valid = rows.a.shape[1] if mask is None else mask.sum(1)[:, None, None]
        super().add_inputs(indices, replace(rows, a=rows.a / n_valid))

    def _rows(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return (x if mask is None else x * mask[..., None]).sum(2).flatten(0, 1)


class Gradient(KfacApprox):
    """`F_out = Σ G Gᵀ` and `F_in = Σ Gᵀ G / Σ ‖G‖²` with `G = Σ_t g_t a_tᵀ` of a sample and seed.

    One step of power iteration from the identity towards the Kronecker product nearest to the exact
    block (Van Loan & Pitsianis, 1993); its trace is exact. G is the weight's exact gradient, so
    padding needs no mask.
    """

    uses_inputs: ClassVar[bool] = False

    def add_gradients(self, rows: Rows) -> None:
        block = self.blocks[rows.index]
        gradients = per_sample_gradients(rows.a, rows.g).flatten(0, 1)
        self.updates.add(block.output_factor, gradients.mT.flatten(0, 1))
        energy = self.updates.add(block.input_factor, gradients.flatten(0, 1))
        block.normalizer = block.normalizer + energy


KFAC_APPROX: dict[str, type[KfacApprox]] = {
    "expand": Expand,
    "reduce": Reduce,
    "gradient": Gradient,
}
