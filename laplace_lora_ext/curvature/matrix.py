"""Block-diagonal curvature from Kronecker factors, the large ones low-rank.

Data are summed into a `LowRankKron`; a prior is added to a `LowRankKronDecomposed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laplace_lora_ext.curvature.block import DecomposedBlock, KroneckerBlock
from laplace_lora_ext.curvature.factors import LowRankFactor
from laplace_lora_ext.curvature.roots import InverseRoots, SquareForm
from laplace_lora_ext.rounding import equal_up_to_rounding


class LowRankKron:
    """Block-diagonal curvature as sums, a Kronecker-factored block for each weight."""

    def __init__(self, blocks: Sequence[KroneckerBlock]) -> None:
        self.blocks = list(blocks)

    @classmethod
    def from_state_dict(
        cls,
        state: list[dict[str, Any]],
        places: Sequence[tuple[torch.device, torch.dtype]],
    ) -> LowRankKron:
        """Rebuild what `state_dict` returned, each block on its own device."""
        blocks: list[KroneckerBlock] = []
        for of_block, (device, dtype) in zip(state, places, strict=True):
            blocks.append(KroneckerBlock.from_state_dict(of_block, device, dtype))
        return cls(blocks)

    def state_dict(self) -> list[dict[str, Any]]:
        """Collect tensors and numbers of each block, ready for `torch.save`."""
        return [block.state_dict() for block in self.blocks]

    def copy(self) -> LowRankKron:
        """Copy the sums, so that data which are added to the copy leave these alone."""
        return LowRankKron([block.copy() for block in self.blocks])

    @property
    def nbytes(self) -> int:
        """Count the memory of the large factors once they have all their columns."""
        total = 0
        for block in self.blocks:
            for factor in (block.output_factor, block.input_factor):
                if isinstance(factor, LowRankFactor):
                    n_numbers = factor.size * factor.width
                    total += n_numbers * factor.columns.element_size()
        return total

    def __add__(self, other: LowRankKron) -> LowRankKron:
        """Add factors as if all data had been seen in one run."""
        pairs = zip(self.blocks, other.blocks, strict=True)
        return LowRankKron([mine + its for mine, its in pairs])

    def decompose(self, device: torch.device | None = None) -> LowRankKronDecomposed:
        """Eigendecompose every factor, in float64.

        `device` is for the numbers of all blocks together; by default it is the first
        block's.
        """
        blocks = [block.decompose() for block in self.blocks]
        deltas = blocks[0].small.values.new_zeros(len(blocks), device=device)
        return LowRankKronDecomposed(blocks, deltas)


class Spectrum(NamedTuple):
    """Eigenvalues of a curvature, those of all blocks in one row.

    A prior precision only adds to eigenvalues, so these are all that a choice of prior
    depends on.
    """

    leading: Tensor  # (E,), the r x k eigenvalues that each block keeps
    leading_block: Tensor  # (E,), index of the block that each belongs to
    # (F,), each block's r ones on directions that its rank leaves out.
    remaining: Tensor
    remaining_block: Tensor  # (F,), index of the block that each belongs to
    multiplicity: Tensor  # (F,), the number of directions of each
    n_blocks: int

    def equals(self, other: Spectrum) -> bool:
        """Tell whether both are of one curvature, in any place and precision."""
        mine = torch.cat([self.leading, self.remaining]).cpu()
        its = torch.cat([other.leading, other.remaining]).cpu()
        return equal_up_to_rounding(its, mine, torch.float32)

    def shifted(
        self,
        scale: float | Tensor,
        deltas: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute all eigenvalues of `scale * curvature + deltas * I`.

        `deltas` are `()`, `(1,)` or `(blocks,)`, and give the result its dtype.
        """
        deltas = deltas.expand(self.n_blocks)
        leading = self.leading.to(deltas) * scale
        remaining = self.remaining.to(deltas) * scale
        leading = leading + deltas[self.leading_block]
        remaining = remaining + deltas[self.remaining_block]
        return leading, remaining

    def logdet(
        self,
        scale: float | Tensor,
        deltas: Tensor,
    ) -> Tensor:
        """Compute log det(`scale * curvature + deltas * I`) in float64."""
        leading, remaining = self.shifted(scale, deltas.double())
        of_remaining = self.multiplicity * remaining.log()
        return leading.log().sum() + of_remaining.sum()


class LowRankKronDecomposed:
    """`LowRankKron` in eigenvectors, to which a prior precision can be added.

    It has the methods of `laplace.utils.matrix.KronDecomposed`.

    Parameters
    ----------
    blocks : sequence of DecomposedBlock
    deltas : torch.Tensor
        `(blocks,)`, the multiple of the identity to add to each block
    """

    def __init__(
        self,
        blocks: Sequence[DecomposedBlock],
        deltas: Tensor,
    ) -> None:
        self.blocks = list(blocks)
        self.deltas = deltas

    @cached_property
    @torch.inference_mode(False)  # what is kept must not be an inference tensor
    def spectrum(self) -> Spectrum:
        """Collect the eigenvalues of all blocks in float64, without `deltas`."""
        zero = self.deltas.new_zeros((), dtype=torch.float64)
        of_leading: list[Tensor] = []
        of_remaining: list[Tensor] = []
        n_leading: list[int] = []
        n_remaining: list[int] = []
        for block in self.blocks:
            leading, remaining = block.eigenvalues(zero)
            if not block.n_left_out:  # there are no directions that these belong to
                remaining = remaining[:0]
            of_leading.append(leading.to(zero.device).flatten())
            of_remaining.append(remaining.to(zero.device))
            n_leading.append(leading.numel())
            n_remaining.append(len(remaining))
        n_blocks = len(self.blocks)
        leading_block = _repeated(range(n_blocks), n_leading)
        remaining_block = _repeated(range(n_blocks), n_remaining)
        n_left_out = [float(block.n_left_out) for block in self.blocks]
        return Spectrum(
            leading=torch.cat(of_leading),
            leading_block=leading_block.to(zero.device),
            remaining=torch.cat(of_remaining),
            remaining_block=remaining_block.to(zero.device),
            multiplicity=_repeated(n_left_out, n_remaining).to(zero),
            n_blocks=n_blocks,
        )

    @cached_property
    def inverse_roots(self) -> InverseRoots:
        """Prepare the inverse root, which all predictions multiply by."""
        return InverseRoots(self.blocks, self.deltas)

    def __add__(self, deltas: float | Tensor) -> LowRankKronDecomposed:
        """Add a multiple of the identity: a scalar, or `(blocks,)`."""
        return LowRankKronDecomposed(self.blocks, self.deltas + deltas)

    def __mul__(self, scalar: float | Tensor) -> LowRankKronDecomposed:
        """Scale the curvature but not `deltas`, as the host does."""
        scaled = [block * scalar for block in self.blocks]
        return LowRankKronDecomposed(scaled, self.deltas)

    def __radd__(self, deltas: float | Tensor) -> LowRankKronDecomposed:
        return self + deltas

    def __rmul__(self, scalar: float | Tensor) -> LowRankKronDecomposed:
        return self * scalar

    def logdet(self) -> Tensor:
        """Compute the log-determinant in float64, differentiable in `deltas`."""
        return self.spectrum.logdet(1, self.deltas)

    def bmm(
        self,
        W: Tensor,
        exponent: float = -1,
    ) -> Tensor:
        """Multiply each row of `W`, `(..., parameters)`, by `self ** exponent`."""
        products: list[Tensor] = []
        for block, delta, weights in self._with_parts(W):
            product = block.bmm(weights, delta, exponent)
            product = block.small_side_first(product).flatten(-2)
            products.append(product.to(W.device))
        return torch.cat(products, dim=-1)

    def inv_square_form(self, W: Tensor) -> Tensor:
        """Compute `W self⁻¹ Wᵀ`, `(B, C, C)`, for `W` of shape `(B, C, parameters)`."""
        form = SquareForm(self.inverse_roots)
        for index, (_, _, weights) in enumerate(self._with_parts(W)):
            form.add(index, weights)
        return form.total().to(W.device)

    def diag(self, exponent: float = 1) -> Tensor:
        """Compute the diagonal of `self ** exponent`, `(parameters,)`."""
        diagonals: list[Tensor] = []
        for block, delta in zip(self.blocks, self.deltas, strict=True):
            diagonal = block.diag(delta, exponent)
            diagonals.append(diagonal.to(self.deltas.device))
        return torch.cat(diagonals)

    def to_matrix(self, exponent: float = 1) -> Tensor:
        """Make the dense matrix of `self ** exponent`; for tests."""
        n_params = sum(block.n_params for block in self.blocks)
        identity = torch.eye(n_params).to(self.deltas)
        return self.bmm(identity, exponent)

    def _with_parts(
        self,
        W: Tensor,
    ) -> Iterator[tuple[DecomposedBlock, Tensor, Tensor]]:
        """Yield each block, its delta, and its part `(..., r, d)` of `W`."""
        n_params = [block.n_params for block in self.blocks]
        parts = W.split(n_params, dim=-1)
        for block, delta, part in zip(self.blocks, self.deltas, parts, strict=True):
            weights = part.unflatten(-1, block.shape)
            weights = block.small_side_first(weights)
            yield block, delta, weights.to(block.device)


def trace_of(curvature: Any) -> float:
    """Return the trace of a posterior's curvature, of any structure."""
    if isinstance(curvature, LowRankKronDecomposed):
        spectrum = curvature.spectrum
        remaining = spectrum.multiplicity * spectrum.remaining
        return (spectrum.leading.sum() + remaining.sum()).item()
    if not isinstance(curvature, Tensor):  # the host's
        return curvature.diag().double().sum().item()
    diagonal = curvature if curvature.ndim == 1 else curvature.diagonal()
    return diagonal.double().sum().item()


def _repeated(
    numbers: Sequence[float],
    times: Sequence[int],
) -> Tensor:
    """Repeat each number so many times, in one row."""
    counts = torch.tensor(times)
    return torch.tensor(numbers).repeat_interleave(counts)
