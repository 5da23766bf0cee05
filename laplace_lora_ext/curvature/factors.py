"""Kronecker factors, small dense ones and large low-rank ones, and their updates.

Both sum outer products of rows that arrive batch by batch, and share a vocabulary: `+`
and `eigendecomposition`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

LinAlgError = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]

# Rows in one step of the streaming update. Its Gram matrix has so many rows and columns
# more than there are columns to keep: one of thousands of nearly dependent rows may
# fail to decompose.
_CHUNK = 256
# Directions that subspace iteration carries beyond the ones it returns.
_OVERSAMPLING = 10


class Eigendecomposition(NamedTuple):
    """`vectors diag(values) vectorsᵀ + tail (I - vectors vectorsᵀ)`."""

    vectors: Tensor  # (d, k), orthonormal columns
    values: Tensor  # (k,), not negative
    # (), the eigenvalue of every direction that `vectors` leaves out.
    tail: Tensor


@dataclass(eq=False)
class DenseFactor:
    """A small Kronecker factor, held as a matrix `(d, d)`."""

    matrix: Tensor

    @classmethod
    def zeros(
        cls,
        size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> DenseFactor:
        """Make a factor of no data."""
        return cls(torch.zeros(size, size, device=device, dtype=dtype))

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
        cls,
        size: int,
        rank: int,
        tail: bool,
        device: torch.device,
        dtype: torch.dtype,
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
        return Eigendecomposition(
            vectors.to(dtype),
            values.to(dtype),
            tail.to(dtype),
        )


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

    def add(
        self,
        factor: Factor,
        rows: Tensor,
    ) -> Tensor:
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
        groups: dict[tuple[Any, ...], _Group] = {}
        for factor, parts in waiting.items():
            rows = torch.cat(parts)
            columns = factor.columns
            key = columns.shape, rows.shape, factor.width, columns.device, columns.dtype
            group = groups.setdefault(key, _Group())
            group.factors.append(factor)
            group.rows.append(rows)
        for group in groups.values():
            group.update()


@dataclass(eq=False)
class _Group:
    """Large factors of one shape, and as many rows `(n, d)` for each."""

    factors: list[LowRankFactor] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)

    def update(self) -> None:
        """Add the rows, unless some are not finite."""
        traces = torch.stack([factor.trace for factor in self.factors])
        if not traces.isfinite().all():
            return
        width = self.factors[0].width
        # (factors, d, w)
        columns = torch.stack([factor.columns for factor in self.factors])
        for chunk in torch.stack(self.rows).split(_CHUNK, dim=1):
            longer = torch.cat([columns, chunk.mT], dim=-1)
            columns = _leading(longer, width)
        for factor, updated in zip(self.factors, columns, strict=True):
            factor.columns = updated


def _leading(
    columns: Tensor,
    width: int,
) -> Tensor:
    """Rotate `(..., d, n)` columns onto their leading `width` left singular directions.

    The rotation comes from the columns' Gram matrix, within a subspace of a few
    dimensions more than there are directions to keep. Two steps of subspace iteration
    from a fixed random start find it (Halko, Martinsson & Tropp, 2011), exactly if the
    matrix has no higher rank.
    """
    n = columns.shape[-1]
    if n <= width:
        return columns
    gram = (columns.mT @ columns).double()
    start = _start(width, gram.device)[:n]
    iterated = gram @ (gram @ start)
    basis = torch.linalg.qr(iterated).Q
    _, rotation = _eigh(basis.mT @ gram @ basis)
    rotation = basis @ rotation
    first = rotation.shape[-1] - width  # eigenvalues ascend
    leading = rotation[..., first:]
    return columns @ leading.to(columns.dtype)


@lru_cache
def _start(
    width: int,
    device: torch.device,
) -> Tensor:
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
