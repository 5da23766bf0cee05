"""The two ways to sum Kronecker factors from inputs and output gradients.

Pure mathematics. Shapes: B samples, T positions, S seeds, a weight `(m, n)`; inputs a
`(B, T, n)` and output gradients g `(S, B, T, m)`. Only what needs the mask of valid positions asks
for it, since the positions that a layer sees need not be the mask's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from laplace_lora_ext.curvature.block import KroneckerBlock
from laplace_lora_ext.curvature.factors import StreamingUpdates
from laplace_lora_ext.passes.recording import Gradients, GradientsOfRows, Inputs, Visitor


class KfacApprox(Visitor):
    """Adds a batch's inputs and gradients to the blocks of a curvature."""

    needs_rows = False  # whether the gradient of a matrix does not suffice

    def __init__(
        self,
        blocks: Sequence[KroneckerBlock],
        updates: StreamingUpdates,
    ) -> None:
        self.blocks = blocks
        self.updates = updates


class Expand(KfacApprox):
    """`F_out = Σ_nt g gᵀ` and `F_in = Σ_nt a aᵀ / Σ_n T_n`, over valid positions.

    The setting of the paper (section 3), and KFAC-expand of Eschenhagen et al. (2023).
    """

    sees_inputs = True
    needs_rows = True

    def inputs(self, inputs: Inputs) -> None:
        """Sum `a aᵀ`, which is the same for all blocks that share the inputs."""
        a = inputs.positions.valid(inputs.a[None])
        for index in inputs.indices:
            block = self.blocks[index]
            self.updates.add(block.input_factor, a)
            block.normalizer = block.normalizer + len(a)

    def gradients(self, gradients: Gradients) -> None:
        """Sum `g gᵀ`."""
        assert isinstance(gradients, GradientsOfRows)  # others are refused beforehand
        g = gradients.positions.valid(gradients.g)
        # After the last attention, only the positions that the model pools have a gradient.
        g = g[g.any(dim=1)]
        self.updates.add(self.blocks[gradients.index].output_factor, g)


class Gradient(KfacApprox):
    """`F_out = Σ G Gᵀ` and `F_in = Σ Gᵀ G / Σ ‖G‖²` with `G = Σ_t g_t a_tᵀ` of a sample and seed.

    One step of power iteration from the identity towards the Kronecker product nearest to the exact
    block (Van Loan & Pitsianis, 1993); its trace is exact. G is the weight's exact gradient, so
    padding needs no mask.
    """

    def gradients(self, gradients: Gradients) -> None:
        """Sum `G Gᵀ` and `Gᵀ G`."""
        block = self.blocks[gradients.index]
        if isinstance(gradients, GradientsOfRows) and gradients.a.shape[1] == 1:
            of_outputs, of_inputs = _rows_of_one_position(gradients.a, gradients.g)
        else:
            G = gradients.of_weight().flatten(0, 1)
            of_outputs = G.mT.flatten(0, 1)
            of_inputs = G.flatten(0, 1)
        self.updates.add(block.output_factor, of_outputs)
        energy = self.updates.add(block.input_factor, of_inputs)
        # Both factors have the trace Σ ‖G‖², and their product is to have it once.
        block.normalizer = block.normalizer + energy


def _rows_of_one_position(
    a: torch.Tensor,
    g: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make rows whose products are those of `G = g aᵀ`: `(S B, m)` and `(B, n)`.

    `G Gᵀ = ‖a‖² g gᵀ` and `Gᵀ G = ‖g‖² a aᵀ` need one row where G has m or n of them, as many as a
    head's layer has outputs or inputs.
    """
    of_outputs = g * a.norm(dim=-1, keepdim=True)
    of_inputs = a * torch.linalg.vector_norm(g, dim=(0, -1), keepdim=True)[0]
    return of_outputs.flatten(0, 2), of_inputs.flatten(0, 1)


KFAC_APPROX: dict[str, type[KfacApprox]] = {"expand": Expand, "gradient": Gradient}
