"""Block-diagonal curvature from Kronecker factors, the large ones of which are low-rank.

Data are summed into a `LowRankKron`; a prior is added to a `LowRankKronDecomposed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from laplace_lora_ext.curvature.block import DecomposedBlock, KroneckerBlock
from laplace_lora_ext.curvature.factors import LowRankFactor

_ROUNDING = 1e-6  # relative to the largest eigenvalue: ten times that of single precision


class LowRankKron:
    """Sum form of a block-diagonal curvature: a Kronecker-factored block for each LoRA weight."""

    def __init__(self, blocks: Sequence[KroneckerBlock]) -> None:
        self.blocks = list(blocks)

    @classmethod
    def from_state_dict(
        cls, state: list[dict[str, Any]], places: Sequence[tuple[torch.device, torch.dtype]]
    ) -> LowRankKron:
        """Rebuild what `state_dict` returned, each block on its device and in its precision."""
        pairs = zip(state, places, strict=True)
        return cls([KroneckerBlock.from_state_dict(block, *place) for block, place in pairs])

    def state_dict(self) -> list[dict[str, Any]]:
        """Tensors and numbers of each block, ready for `torch.save`."""
        return [block.state_dict() for block in self.blocks]

    @property
    def nbytes(self) -> int:
        """Memory of the large factors once they have all their columns."""
        factors = (f for block in self.blocks for f in (block.output_factor, block.input_factor))
        large = [factor for factor in factors if isinstance(factor, LowRankFactor)]
        return sum(f.size * f.width * f.columns.element_size() for f in large)

    def __add__(self, other: LowRankKron) -> LowRankKron:
        """Add factors as if all data had been seen in one run."""
        return LowRankKron([a + b for a, b in zip(self.blocks, other.blocks, strict=True)])

    def decompose(self, device: torch.device | None = None) -> LowRankKronDecomposed:
        """Eigendecompose every factor, in float64.

        `device` is for the numbers of all blocks together; by default it is the first block's.
        """
        blocks = [block.decompose() for block in self.blocks]
        deltas = blocks[0].small.values.new_zeros(len(blocks), device=device)
        return LowRankKronDecomposed(blocks, deltas)


class Spectrum(NamedTuple):
    """Eigenvalues of a curvature, those of all blocks in one row.

    A prior precision only adds to eigenvalues, so these are all that a choice of prior depends on.

    """

    leading: torch.Tensor  # (E,), the r x k eigenvalues that each block keeps
    leading_block: torch.Tensor  # (E,), index of the block that each belongs to
    remaining: torch.Tensor  # (F,), each block's r ones on directions that its rank leaves out
    remaining_block: torch.Tensor  # (F,), index of the block that each belongs to
    multiplicity: torch.Tensor  # (F,), the number of directions of each
    n_blocks: int

    def equals(self, other: Spectrum) -> bool:
        """Whether both are of one curvature, maybe on other devices or in other precisions."""
        mine, its = (torch.cat([s.leading, s.remaining]).cpu() for s in (self, other))
        if mine.shape != its.shape:
            return False
        return bool((mine - its).abs().max() <= _ROUNDING * mine.abs().max())

    def shifted(
        self, scale: float | torch.Tensor, deltas: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Leading and remaining eigenvalues of `scale * curvature + deltas * I`.

        `deltas` are `()`, `(1,)` or `(blocks,)`, and give the result its dtype.
        """
        deltas = deltas.expand(self.n_blocks)
        return (
            self.leading.to(deltas) * scale + deltas[self.leading_block],
            self.remaining.to(deltas) * scale + deltas[self.remaining_block],
        )

    def logdet(self, scale: float | torch.Tensor, deltas: torch.Tensor) -> torch.Tensor:
        """Log-determinant of `scale * curvature + deltas * I`, in float64."""
        leading, remaining = self.shifted(scale, deltas.double())
        return leading.log().sum() + (self.multiplicity * remaining.log()).sum()


class LowRankKronDecomposed:
    """Decomposed form of `LowRankKron`, to which a scalar or layerwise prior can be added.

    It has the methods of `laplace.utils.matrix.KronDecomposed`.

    Parameters
    ----------
    blocks : sequence of DecomposedBlock
    deltas : torch.Tensor
        `(blocks,)`, the multiple of the identity to add to each block
    """

    def __init__(self, blocks: Sequence[DecomposedBlock], deltas: torch.Tensor) -> None:
        self.blocks, self.deltas = list(blocks), deltas

    @cached_property
    @torch.inference_mode(False)  # what is kept must not be an inference tensor
    def spectrum(self) -> Spectrum:
        """Eigenvalues of all blocks in float64, without `deltas`."""
        of_blocks, zero = [], self.deltas.new_zeros((), dtype=torch.float64)
        for index, block in enumerate(self.blocks):
            leading, remaining = (e.to(zero.device).flatten() for e in block.eigenvalues(zero))
            remaining = remaining[: None if block.n_left_out else 0]
            indices = [torch.full_like(e, index, dtype=torch.long) for e in (leading, remaining)]
            multiplicity = torch.full_like(remaining, block.n_left_out)
            of_blocks.append((leading, indices[0], remaining, indices[1], multiplicity))
        columns: Any = map(torch.cat, zip(*of_blocks, strict=True))
        return Spectrum(*columns, n_blocks=len(self.blocks))

    def __add__(self, deltas: float | torch.Tensor) -> LowRankKronDecomposed:
        """Add a multiple of the identity: a scalar, or `(blocks,)` one for each block."""
        return LowRankKronDecomposed(self.blocks, self.deltas + deltas)

    def __mul__(self, scalar: float | torch.Tensor) -> LowRankKronDecomposed:
        """Scale the curvature but not `deltas`, as the host does."""
        return LowRankKronDecomposed([block * scalar for block in self.blocks], self.deltas)

    __radd__ = __add__
    __rmul__ = __mul__

    def logdet(self) -> torch.Tensor:
        """Log-determinant in float64, differentiable in `deltas`."""
        return self.spectrum.logdet(1, self.deltas)

    def bmm(self, W: torch.Tensor, exponent: float = -1) -> torch.Tensor:
        """`self ** exponent` times each row of `W`, `(..., parameters)`."""
        products = [
            block.small_side_first(block.bmm(part, delta, exponent)).flatten(-2).to(W.device)
            for block, delta, part in self._split(W)
        ]
        return torch.cat(products, dim=-1)

    def inv_square_form(self, W: torch.Tensor) -> torch.Tensor:
        """`W self⁻¹ Wᵀ`, `(B, C, C)`, for `W` of shape `(B, C, parameters)`."""
        forms = [
            block.inv_square_form(part, delta).to(W.device) for block, delta, part in self._split(W)
        ]
        return torch.stack(forms).sum(0)

    def diag(self, exponent: float = 1) -> torch.Tensor:
        """Diagonal of `self ** exponent`, `(parameters,)`."""
        pairs = zip(self.blocks, self.deltas, strict=True)
        device = self.deltas.device
        return torch.cat([block.diag(delta, exponent).to(device) for block, delta in pairs])

    def to_matrix(self, exponent: float = 1) -> torch.Tensor:
        """Dense matrix of `self ** exponent`. For tests."""
        n_params = sum(block.n_params for block in self.blocks)
        return self.bmm(torch.eye(n_params).to(self.deltas), exponent)

    def _split(self, W: torch.Tensor) -> list[tuple[DecomposedBlock, torch.Tensor, torch.Tensor]]:
        """Each block with its delta and its part of `W`, `(..., r, d)`, on the block's device."""
        parts = W.split([block.n_params for block in self.blocks], dim=-1)
        return [
            (block, delta, block.small_side_first(part.unflatten(-1, block.shape)).to(block.device))
            for block, delta, part in zip(self.blocks, self.deltas, parts, strict=True)
        ]
