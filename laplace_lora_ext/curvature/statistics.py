"""The three ways to sum a block's Kronecker factors from inputs and output gradients.

Pure mathematics. Shapes: B samples, T positions, S seeds, a weight `(m, n)`; inputs a
`(B, T, n)`, output gradients g `(S, B, T, m)`, and `valid`, which returns `(B, T)` booleans, false
where a position is padding, or None where none is. It is only asked where it matters, since not
every layer sees the positions of the mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

import torch

from laplace_lora_ext.curvature.streaming import StreamingUpdates
from laplace_lora_ext.kronecker_block import KroneckerBlock

Valid = Callable[[], torch.Tensor | None]


class KfacApprox(Protocol):
    """One approximation: what a batch's inputs and each seed's gradients add to a block.

    Attributes
    ----------
    uses_inputs : bool
        whether inputs count by themselves, and not only together with their gradients
    """

    uses_inputs: ClassVar[bool]

    @staticmethod
    def add_inputs(
        block: KroneckerBlock, a: torch.Tensor, valid: Valid, updates: StreamingUpdates
    ) -> None:
        """Called once a batch for each call of a layer, where inputs count by themselves."""

    @staticmethod
    def add_gradients(
        block: KroneckerBlock,
        a: torch.Tensor,
        g: torch.Tensor,
        valid: Valid,
        updates: StreamingUpdates,
    ) -> None:
        """Called for the gradients of one or more seeds of a batch."""


class Expand:
    """`F_out = Σ_nt g gᵀ` and `F_in = Σ_nt a aᵀ / Σ_n T_n`, over valid positions.

    The setting of the paper (section 3), and KFAC-expand of Eschenhagen et al. (2023).
    """

    uses_inputs: ClassVar[bool] = True

    @staticmethod
    def add_inputs(
        block: KroneckerBlock, a: torch.Tensor, valid: Valid, updates: StreamingUpdates
    ) -> None:
        mask = valid()
        rows = a.flatten(0, 1) if mask is None else a[mask]
        updates.add(block.input_factor, rows)
        block.normalizer = block.normalizer + len(rows)

    @staticmethod
    def add_gradients(
        block: KroneckerBlock,
        a: torch.Tensor,
        g: torch.Tensor,
        valid: Valid,
        updates: StreamingUpdates,
    ) -> None:
        mask = valid()
        rows = (g.flatten(1, 2) if mask is None else g[:, mask]).flatten(0, 1)
        # Behind the last attention only positions that the model pools have a gradient.
        updates.add(block.output_factor, rows[rows.any(dim=1)])


class Reduce:
    """`F_out = Σ_n (Σ_t g) (Σ_t g)ᵀ` and `F_in = Σ_n ā āᵀ / N` with ā the mean of valid positions.

    KFAC-reduce of Eschenhagen et al. (2023).
    """

    uses_inputs: ClassVar[bool] = True

    @staticmethod
    def add_inputs(
        block: KroneckerBlock, a: torch.Tensor, valid: Valid, updates: StreamingUpdates
    ) -> None:
        mask = valid()
        if mask is None:
            means = a.mean(1)
        else:
            means = (a * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        updates.add(block.input_factor, means)
        block.normalizer = block.normalizer + len(means)

    @staticmethod
    def add_gradients(
        block: KroneckerBlock,
        a: torch.Tensor,
        g: torch.Tensor,
        valid: Valid,
        updates: StreamingUpdates,
    ) -> None:
        mask = valid()
        if mask is not None:
            g = g * mask[..., None]
        updates.add(block.output_factor, g.sum(2).flatten(0, 1))


class Gradient:
    """`F_out = Σ G Gᵀ` and `F_in = Σ Gᵀ G / Σ ‖G‖²` with `G = Σ_t g_t a_tᵀ` a sample and seed.

    One power-iteration step, started at the identity, towards the Kronecker product that is
    nearest to the exact block (Van Loan & Pitsianis, 1993); its trace is exact. G is the exact
    gradient of the weight, so padding needs no mask.
    """

    uses_inputs: ClassVar[bool] = False

    @staticmethod
    def add_inputs(
        block: KroneckerBlock, a: torch.Tensor, valid: Valid, updates: StreamingUpdates
    ) -> None:
        """Inputs count only together with their gradients."""

    @staticmethod
    def add_gradients(
        block: KroneckerBlock,
        a: torch.Tensor,
        g: torch.Tensor,
        valid: Valid,
        updates: StreamingUpdates,
    ) -> None:
        gradients = torch.einsum("bti,sbto->sboi", a, g).flatten(0, 1)
        updates.add(block.output_factor, gradients.mT.flatten(0, 1))
        energy = updates.add(block.input_factor, gradients.flatten(0, 1))
        block.normalizer = block.normalizer + energy


KFAC_APPROX: dict[str, type[KfacApprox]] = {
    "expand": Expand,
    "reduce": Reduce,
    "gradient": Gradient,
}
