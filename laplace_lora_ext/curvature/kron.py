"""Sums over data: Kronecker factors, small dense ones and large low-rank ones.

Both sum outer products of rows that arrive batch by batch. A block has one of each, and
a `LowRankKron` a block for each weight; a prior is added to a `LowRankKronDecomposed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from laplace_lora_ext.curvature.decomposed import (
    DecomposedBlock,
    Eigendecomposition,
    LowRankKronDecomposed,
)

LinAlgError = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]

# Rows in one step of the streaming update. Its Gram matrix has so many rows and columns
# more than there are columns to keep: one of thousands of nearly dependent rows may
# fail to decompose.
_CHUNK = 256
# Directions that subspace iteration carries beyond the ones it returns.
_OVERSAMPLING = 10


@dataclass(eq=False)
class DenseFactor:
    """A small Kronecker factor, held as a matrix `(d, d)`."""

    matrix: Tensor

    @property
    def size(self) -> int:
        """Return d."""
        return len(self.matrix)

    @property
    def trace(self) -> Tensor:
        """Compute the trace in float64, as the large factor holds its own."""
        return self.matrix.trace().double()

    def __add__(self, other: Factor) -> DenseFactor:
        """Add what other data gave."""
        assert isinstance(other, DenseFactor)
        return DenseFactor(self.matrix + other.matrix)

    def eigendecomposition(self) -> Eigendecomposition:
        """Compute all eigenvectors; the tail is 0."""
        values, vectors = _eigh(self.matrix)
        dtype = self.matrix.dtype
        values = values.clamp_min(0).to(dtype)  # rounding may leave some below 0
        return Eigendecomposition(vectors.to(dtype), values, values.new_zeros(()))


@dataclass(eq=False)
class LowRankFactor:
    """A large Kronecker factor, held as its leading directions and its trace.

    The factor is `columns columnsᵀ`, up to the energy that truncation drops. It keeps
    twice as many columns as the rank, between fits and in files too, so that it does
    not lose a direction early that leads later. The eigendecomposition cuts to the
    rank. No `(d, d)` matrix is ever formed.

    Yang et al. (ICLR 2024), algorithm 1, for the update.
    """

    columns: Tensor  # (d, w) with w <= min(2 * rank, d)
    trace: Tensor  # (), float64, exact despite the truncation
    rank: int  # how many eigenvectors to keep in the end (the paper's `n_kfac`)
    # Whether directions beyond it keep the mean of their eigenvalues, or none.
    tail: bool = True

    @classmethod
    def zeros(
        cls, size: int, rank: int, tail: bool, device: torch.device, dtype: torch.dtype
    ) -> LowRankFactor:
        """Make a factor of no data."""
        columns = torch.zeros(size, 0, device=device, dtype=dtype)
        trace = torch.zeros((), device=device, dtype=torch.float64)
        return cls(columns, trace, rank, tail)

    @property
    def size(self) -> int:
        """Return d."""
        return len(self.columns)

    @property
    def width(self) -> int:
        """Say how many columns to keep."""
        return min(2 * self.rank, self.size)

    def __add__(self, other: Factor) -> LowRankFactor:
        """Merge two factors: append columns, and keep the leading ones."""
        assert isinstance(other, LowRankFactor)
        columns = torch.cat([self.columns, other.columns], dim=1)
        trace = self.trace + other.trace
        return LowRankFactor(_leading(columns, self.width), trace, self.rank, self.tail)

    def eigendecomposition(self) -> Eigendecomposition:
        """Compute the leading `rank` eigenvectors, and the others' mean eigenvalue."""
        columns = self.columns.double()
        vectors, singular_values, _ = torch.linalg.svd(columns, full_matrices=False)
        vectors = vectors[:, : self.rank]
        values = singular_values[: self.rank].square()
        n_left_out = self.size - len(values)
        tail = self.trace.new_zeros(())
        if self.tail and n_left_out:
            energy_left_out = self.trace - values.sum()
            tail = energy_left_out.clamp_min(0) / n_left_out
        dtype = self.columns.dtype
        return Eigendecomposition(vectors.to(dtype), values.to(dtype), tail.to(dtype))


Factor = DenseFactor | LowRankFactor


class StreamingUpdates:
    """Adds rows to Kronecker factors, updating many large factors at once.

    Updating a large factor takes a dozen operations on small matrices, and time goes by
    their number rather than their size. So rows wait until there are `limit` bytes of
    them; then factors of one shape go together.

    Rows that are not finite make a factor's trace so, and are not added: an
    eigendecomposition would fail on them. Who adds rows looks at the traces, once a
    batch: a look at a number on an accelerator waits for all work there.
    """

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        self._waiting: dict[LowRankFactor, list[Tensor]] = {}
        self._bytes = 0

    def add(self, factor: Factor, rows: Tensor) -> Tensor:
        """Add `rowsᵀ rows`, of rows `(n, d)`, now or at the next `finish`.

        Its trace is summed in float64.
        """
        if isinstance(factor, DenseFactor):
            product = rows.mT @ rows
            factor.matrix = factor.matrix + product
            return product.trace().double()
        energy = torch.linalg.vector_norm(rows, dtype=torch.float64).square()
        factor.trace = factor.trace + energy
        self._waiting.setdefault(factor, []).append(rows)
        self._bytes += rows.nbytes
        if self._bytes >= self._limit:
            self.finish()
        return energy

    def finish(self) -> None:
        """Add all waiting rows."""
        # Whatever fails below, no rows are added twice.
        waiting, self._waiting = self._waiting, {}
        self._bytes = 0
        groups: dict[tuple[Any, ...], list[tuple[LowRankFactor, Tensor]]] = {}
        for factor, parts in waiting.items():
            rows = torch.cat(parts)
            columns = factor.columns
            key = columns.shape, rows.shape, factor.width, columns.device, columns.dtype
            groups.setdefault(key, []).append((factor, rows))
        for group in groups.values():
            factors, of_factors = zip(*group, strict=True)
            _update(factors, of_factors)


def _update(factors: Sequence[LowRankFactor], rows: Sequence[Tensor]) -> None:
    """Add rows to large factors of one shape, `(n, d)` to each, if all are finite."""
    traces = torch.stack([factor.trace for factor in factors])
    if not traces.isfinite().all():
        return
    width = factors[0].width
    # (factors, d, w)
    columns = torch.stack([factor.columns for factor in factors])
    for chunk in torch.stack(list(rows)).split(_CHUNK, dim=1):
        longer = torch.cat([columns, chunk.mT], dim=-1)
        columns = _leading(longer, width)
    for factor, updated in zip(factors, columns, strict=True):
        factor.columns = updated


def _leading(columns: Tensor, width: int) -> Tensor:
    """Rotate `(..., d, n)` columns onto their leading `width` left singular directions.

    Two steps of subspace iteration from a fixed random start find them, within a
    subspace of a few dimensions more (Halko, Martinsson & Tropp, 2011), exactly if the
    columns have no higher rank.
    """
    n = columns.shape[-1]
    if n <= width:
        return columns
    basis = _start(width, columns.device)[:n].to(columns.dtype)
    for _ in range(2):
        # Orthonormal each time: else small directions would be lost, as their squares
        # are.
        basis = torch.linalg.qr(columns.mT @ (columns @ basis)).Q
    within = columns @ basis
    _, rotation = _eigh(within.mT @ within)
    first = rotation.shape[-1] - width  # eigenvalues ascend
    return within @ rotation[..., first:].to(columns.dtype)


@lru_cache
def _start(width: int, device: torch.device) -> Tensor:
    """Draw the directions, always the same, from which subspace iteration starts."""
    generator = torch.Generator().manual_seed(0)
    # As many rows as there may be columns: those kept of two factors, or of one and a
    # chunk.
    shape = _CHUNK + 2 * width, width + _OVERSAMPLING
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose a semi-definite matrix in float64, in ascending order."""
    matrix = matrix.double()
    try:
        return torch.linalg.eigh(matrix)
    # eigh does not converge for some matrices with many equal eigenvalues.
    except LinAlgError:
        vectors, values, _ = torch.linalg.svd(matrix)
        return values.flip(-1), vectors.flip(-1)


@dataclass(eq=False)
class KroneckerBlock:
    """Curvature of one LoRA weight `(m, n)` in sum form: `F_out ⊗ F_in / normalizer`.

    Exactly one of the two is a `LowRankFactor`.
    """

    output_factor: Factor  # F_out, (m, m), from output gradients
    input_factor: Factor  # F_in, (n, n), from inputs
    normalizer: Tensor  # (), float64: both factors sum over the data

    @classmethod
    def zeros(
        cls,
        shape: tuple[int, int],
        small_output: bool,
        rank: int,
        tail: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> KroneckerBlock:
        """Make empty sums for a weight with the LoRA rank as one side."""
        small, large = shape if small_output else reversed(shape)
        dense = DenseFactor(torch.zeros(small, small, device=device, dtype=dtype))
        low_rank = LowRankFactor.zeros(large, rank, tail, device, dtype)
        normalizer = torch.zeros((), device=device, dtype=torch.float64)
        if small_output:
            return cls(dense, low_rank, normalizer)
        return cls(low_rank, dense, normalizer)

    @classmethod
    def from_state_dict(
        cls, state: dict[str, Any], device: torch.device, dtype: torch.dtype
    ) -> KroneckerBlock:
        """Rebuild what `state_dict` returned; sums of squares stay in float64."""
        factors: list[Any] = []
        for name in ("output_factor", "input_factor"):
            of_factor = dict(state[name])
            for key, value in of_factor.items():
                if isinstance(value, Tensor):
                    to = torch.float64 if key == "trace" else dtype
                    of_factor[key] = value.to(device, to)
            kind = DenseFactor if "matrix" in of_factor else LowRankFactor
            factors.append(kind(**of_factor))
        output, input_ = factors
        return cls(output, input_, state["normalizer"].to(device))

    def state_dict(self) -> dict[str, Any]:
        """Collect tensors and numbers, ready for `torch.save`."""
        return {
            "output_factor": dict(vars(self.output_factor)),
            "input_factor": dict(vars(self.input_factor)),
            "normalizer": self.normalizer,
        }

    def copy(self) -> KroneckerBlock:
        """Copy the block, but not its tensors, which updates replace."""
        return KroneckerBlock(
            copy(self.output_factor), copy(self.input_factor), self.normalizer
        )

    def __add__(self, other: KroneckerBlock) -> KroneckerBlock:
        """Add factors as if all data had been seen in one run."""
        return KroneckerBlock(
            self.output_factor + other.output_factor,
            self.input_factor + other.input_factor,
            self.normalizer + other.normalizer,
        )

    def decompose(self) -> DecomposedBlock:
        """Eigendecompose both factors."""
        small = self.output_factor.eigendecomposition()
        large = self.input_factor.eigendecomposition()
        small_output = isinstance(self.output_factor, DenseFactor)
        if not small_output:
            small, large = large, small
        # A block without any gradient has no curvature: 0 / 0 is 0 here.
        scale = torch.where(self.normalizer > 0, 1 / self.normalizer, self.normalizer)
        scaled = small.values * scale  # in float64
        small = small._replace(values=scaled.to(small.values.dtype))
        return DecomposedBlock(small, large, small_output)


class LowRankKron:
    """Block-diagonal curvature as sums, a Kronecker-factored block for each weight."""

    def __init__(self, blocks: Iterable[KroneckerBlock]) -> None:
        self.blocks = list(blocks)

    @classmethod
    def from_state_dict(
        cls,
        state: list[dict[str, Any]],
        places: Sequence[tuple[torch.device, torch.dtype]],
    ) -> LowRankKron:
        """Rebuild what `state_dict` returned, each block on its own device."""
        return cls(
            KroneckerBlock.from_state_dict(of_block, *place)
            for of_block, place in zip(state, places, strict=True)
        )

    def state_dict(self) -> list[dict[str, Any]]:
        """Collect tensors and numbers of each block, ready for `torch.save`."""
        return [block.state_dict() for block in self.blocks]

    def copy(self) -> LowRankKron:
        """Copy the sums, so that data which are added to the copy leave these alone."""
        return LowRankKron(block.copy() for block in self.blocks)

    @property
    def nbytes(self) -> int:
        """Count the memory of the large factors once they have all their columns."""
        return sum(
            factor.size * factor.width * factor.columns.element_size()
            for block in self.blocks
            for factor in (block.output_factor, block.input_factor)
            if isinstance(factor, LowRankFactor)
        )

    def __add__(self, other: LowRankKron) -> LowRankKron:
        """Add factors as if all data had been seen in one run."""
        pairs = zip(self.blocks, other.blocks, strict=True)
        return LowRankKron(mine + its for mine, its in pairs)

    def decompose(self, device: torch.device | None = None) -> LowRankKronDecomposed:
        """Eigendecompose every factor, in float64.

        `device` is for the numbers of all blocks together; by default it is the first
        block's.
        """
        blocks = [block.decompose() for block in self.blocks]
        return LowRankKronDecomposed.of_blocks(blocks, device)
