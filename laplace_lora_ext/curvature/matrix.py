"""Block-diagonal curvature from Kronecker factors, the large ones of which are low-rank.

Data are summed into a `LowRankKron`; a prior is added to a `LowRankKronDecomposed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from laplace_lora_ext.curvature.block import DecomposedBlock, KroneckerBlock
from laplace_lora_ext.curvature.factors import Factor, LowRankFactor
from laplace_lora_ext.curvature.spectrum import Spectrum


class LowRankKron:
    """Sum form of a block-diagonal curvature, with a Kronecker-factored block for each LoRA weight.

    It has the methods of `laplace.utils.matrix.Kron`; those that need eigenvalues decompose it
    first.

    Parameters
    ----------
    blocks : sequence of KroneckerBlock
    """

    def __init__(self, blocks: Sequence[KroneckerBlock]) -> None:
        self.blocks = list(blocks)

    @classmethod
    def from_state_dict(
        cls,
        state: list[dict[str, Any]],
        places: Sequence[tuple[torch.device, torch.dtype]] | None = None,
    ) -> LowRankKron:
        """Rebuild what `state_dict` returned.

        `places` are the device and precision of each block; by default nothing moves.
        """
        known: dict[int, Factor] = {}
        pairs = zip(state, places or [None] * len(state), strict=True)
        return cls([KroneckerBlock.from_state_dict(*pair, known) for pair in pairs])

    def state_dict(self) -> list[dict[str, Any]]:
        """Tensors and numbers of each block, ready for `torch.save`."""
        return [block.state_dict() for block in self.blocks]

    @property
    def kfacs(self) -> list[tuple[Factor, Factor]]:
        """Output and input factor of each block, before division by its normalizer."""
        return [(block.output_factor, block.input_factor) for block in self.blocks]

    @property
    def nbytes(self) -> int:
        """Memory of the large factors once they have all their columns."""
        large = {
            factor for pair in self.kfacs for factor in pair if isinstance(factor, LowRankFactor)
        }
        return sum(f.size * f.width * f.columns.element_size() for f in large)

    def __len__(self) -> int:
        return len(self.blocks)

    def __add__(self, other: LowRankKron) -> LowRankKron:
        """Add factors as if all data had been seen in one run."""
        if not isinstance(other, LowRankKron):
            raise ValueError("Can only add LowRankKron to LowRankKron.")
        return LowRankKron([a + b for a, b in zip(self.blocks, other.blocks, strict=True)])

    def __mul__(self, scalar: float | torch.Tensor) -> LowRankKron:
        return LowRankKron([block * scalar for block in self.blocks])

    __rmul__ = __mul__

    def cut(self) -> LowRankKron:
        """The same curvature without columns beyond the rank, which only more data would use."""
        return LowRankKron([block.cut() for block in self.blocks])

    def decompose(self, device: torch.device | None = None) -> LowRankKronDecomposed:
        """Eigendecompose every factor, in float64.

        `device` is for the numbers of all blocks together; by default it is the first block's.
        """
        blocks = [block.decompose() for block in self.blocks]
        deltas = blocks[0].small.values.new_zeros(len(blocks), device=device)
        return LowRankKronDecomposed(blocks, deltas)

    def logdet(self) -> torch.Tensor:
        """Log-determinant; `-inf` where a direction has no curvature."""
        return self.decompose().logdet()

    def bmm(self, W: torch.Tensor, exponent: float = 1) -> torch.Tensor:
        """`self ** exponent` times `W`; see `LowRankKronDecomposed.bmm`."""
        return self.decompose().bmm(W, exponent)

    def inv_square_form(self, W: torch.Tensor) -> torch.Tensor:
        """`W self⁻¹ Wᵀ`; see `LowRankKronDecomposed.inv_square_form`."""
        return self.decompose().inv_square_form(W)

    def diag(self, exponent: float = 1) -> torch.Tensor:
        """Diagonal of `self ** exponent`, `(parameters,)`."""
        return self.decompose().diag(exponent)

    def to_matrix(self, exponent: float = 1) -> torch.Tensor:
        """Dense matrix of `self ** exponent`. For tests."""
        return self.decompose().to_matrix(exponent)


class LowRankKronDecomposed:
    """Decomposed form of `LowRankKron`, to which a scalar or layerwise prior can be added.

    Parameters
    ----------
    blocks : sequence of DecomposedBlock
    deltas : torch.Tensor
        `(blocks,)`, the multiple of the identity to add to each block
    """

    def __init__(self, blocks: Sequence[DecomposedBlock], deltas: torch.Tensor) -> None:
        self.blocks, self.deltas = list(blocks), deltas

    def __len__(self) -> int:
        return len(self.blocks)

    @cached_property
    @torch.inference_mode(False)  # what is kept must not be an inference tensor
    def spectrum(self) -> Spectrum:
        """Eigenvalues of all blocks in float64, without `deltas`."""
        device = self.deltas.device
        leading, remaining, multiplicity = [], [], []
        for block in self.blocks:
            small, large, tail = (
                numbers.to(device).double()
                for numbers in (block.small.values, block.large.values, block.large.tail)
            )
            leading.append(torch.outer(small, large).flatten())
            remaining.append((small * tail)[: None if block.n_left_out else 0])
            multiplicity.append(torch.full_like(remaining[-1], block.n_left_out))

        def owners(parts: list[torch.Tensor]) -> torch.Tensor:
            sizes = torch.tensor([len(part) for part in parts])
            return torch.arange(len(parts)).repeat_interleave(sizes).to(device)

        return Spectrum(
            torch.cat(leading),
            owners(leading),
            torch.cat(remaining),
            owners(remaining),
            torch.cat(multiplicity),
            len(self.blocks),
        )

    def __add__(self, deltas: torch.Tensor) -> LowRankKronDecomposed:
        """Add a multiple of the identity: a scalar, or `(blocks,)` one for each block.

        Raises
        ------
        ValueError
            If `deltas` is not a tensor of one of these shapes.
        """
        if not isinstance(deltas, torch.Tensor) or deltas.shape not in {
            (),
            (1,),
            (len(self),),
        }:
            raise ValueError(
                f"Add a tensor with one number, or one for each of {len(self)} blocks."
            )
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
        """`self ** exponent` times each row of `W`.

        Parameters
        ----------
        W : torch.Tensor
            `(..., parameters)`
        exponent : float
            any; a negative one needs positive eigenvalues

        Returns
        -------
        torch.Tensor
            of the shape of `W`
        """
        self._check_invertible(exponent)
        products = [
            block.small_side_first(block.bmm(part, delta, exponent)).flatten(-2).to(W.device)
            for block, delta, part in self._split(W)
        ]
        return torch.cat(products, dim=-1)

    def inv_square_form(self, W: torch.Tensor) -> torch.Tensor:
        """`W self⁻¹ Wᵀ` for `W` of shape `(batch, outputs, parameters)`.

        Returns
        -------
        torch.Tensor
            `(batch, outputs, outputs)`
        """
        self._check_invertible(-1)
        forms = [
            block.inv_square_form(part, delta).to(W.device) for block, delta, part in self._split(W)
        ]
        return torch.stack(forms).sum(0)

    def diag(self, exponent: float = 1) -> torch.Tensor:
        """Diagonal of `self ** exponent`, `(parameters,)`."""
        self._check_invertible(exponent)
        pairs = zip(self.blocks, self.deltas, strict=True)
        device = self.deltas.device
        return torch.cat([block.diag(delta, exponent).to(device) for block, delta in pairs])

    def to_matrix(self, exponent: float = 1) -> torch.Tensor:
        """Dense matrix of `self ** exponent`. For tests."""
        self._check_invertible(exponent)
        pairs = zip(self.blocks, self.deltas, strict=True)
        return torch.block_diag(*(block.to_matrix(delta, exponent) for block, delta in pairs))

    def _check_invertible(self, exponent: float) -> None:
        if exponent < 0 and any(
            eigenvalues.min() <= 0
            for block, delta in zip(self.blocks, self.deltas, strict=True)
            for eigenvalues in block.eigenvalues(delta)
            if eigenvalues.numel()
        ):
            raise ValueError("The matrix is singular: add a positive prior precision first.")

    def _split(self, W: torch.Tensor) -> list[tuple[DecomposedBlock, torch.Tensor, torch.Tensor]]:
        """Each block with its delta and its part of `W`, `(..., r, d)`, on the block's device."""
        sizes = [block.n_params for block in self.blocks]
        if W.shape[-1] != sum(sizes):
            raise ValueError(f"The last dimension of W must have {sum(sizes)} parameters.")
        parts = W.split(sizes, dim=-1)
        return [
            (block, delta, block.small_side_first(part.unflatten(-1, block.shape)).to(block.device))
            for block, delta, part in zip(self.blocks, self.deltas, parts, strict=True)
        ]
