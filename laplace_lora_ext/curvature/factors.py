"""The two kinds of Kronecker factor: a small dense one and a large low-rank one.

Both sum outer products of rows that arrive batch by batch, and share a vocabulary: `update`, `+`,
`*`, `eigendecomposition`, `to_matrix`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

_CHUNK = 256  # rows in one step of the streaming update, which holds their Gram matrix
_OVERSAMPLING = 10  # directions that subspace iteration carries beyond the ones it returns


class Eigendecomposition(NamedTuple):
    """`vectors diag(values) vectorsᵀ + tail (I - vectors vectorsᵀ)`.

    Attributes
    ----------
    vectors : torch.Tensor
        `(d, k)`, orthonormal columns
    values : torch.Tensor
        `(k,)`, not negative
    tail : torch.Tensor
        `()`, the eigenvalue of every direction that `vectors` leaves out
    """

    vectors: torch.Tensor
    values: torch.Tensor
    tail: torch.Tensor


@dataclass(eq=False)
class DenseFactor:
    """A small Kronecker factor, held as a matrix.

    Parameters
    ----------
    matrix : torch.Tensor
        `(d, d)`, symmetric positive semi-definite
    """

    matrix: torch.Tensor

    @classmethod
    def zeros(cls, size: int, device: torch.device, dtype: torch.dtype) -> DenseFactor:
        return cls(torch.zeros(size, size, device=device, dtype=dtype))

    @property
    def size(self) -> int:
        return len(self.matrix)

    @property
    def trace(self) -> torch.Tensor:
        return self.matrix.trace().double()

    def update(self, rows: torch.Tensor) -> torch.Tensor:
        """Add `rowsᵀ rows`, for rows of shape `(n, d)`, and return its trace in float64."""
        product = rows.mT @ rows
        self.matrix = self.matrix + product
        return product.trace().double()

    def __add__(self, other: DenseFactor) -> DenseFactor:
        return DenseFactor(self.matrix + other.matrix)

    def __mul__(self, scalar: float | torch.Tensor) -> DenseFactor:
        return DenseFactor(self.matrix * scalar)

    def cut(self) -> DenseFactor:
        """Itself: nothing of a dense factor is cut."""
        return self

    def eigendecomposition(self) -> Eigendecomposition:
        """All eigenvectors; the tail is 0."""
        values, vectors = _eigh(self.matrix)
        dtype = self.matrix.dtype
        values = values.clamp_min(0).to(dtype)
        return Eigendecomposition(vectors.to(dtype), values, values.new_zeros(()))

    def to_matrix(self) -> torch.Tensor:
        """Dense `(d, d)` matrix."""
        return self.matrix


@dataclass(eq=False)
class LowRankFactor:
    """A large Kronecker factor, held as its leading directions and its trace.

    The factor is `columns columnsᵀ`, up to the energy that truncation drops. While rows arrive, it
    keeps twice as many columns as the rank, so that it does not lose a direction early that leads
    later. The eigendecomposition then cuts to the rank. No `(d, d)` matrix is ever formed.

    Parameters
    ----------
    columns : torch.Tensor
        `(d, w)` with `w <= min(2 * rank, d)`
    trace : torch.Tensor
        `()`, float64, trace of the factor, exact despite the truncation
    rank : int
        how many eigenvectors to keep in the end (the paper's `n_kfac`)
    tail : bool
        whether the directions beyond the rank keep the mean of their eigenvalues, or none

    References
    ----------
    Yang et al. (ICLR 2024), algorithm 1, for the update.
    """

    columns: torch.Tensor
    trace: torch.Tensor
    rank: int
    tail: bool = True

    @classmethod
    def zeros(
        cls,
        size: int,
        rank: int,
        device: torch.device,
        dtype: torch.dtype,
        tail: bool = True,
    ) -> LowRankFactor:
        columns = torch.zeros(size, 0, device=device, dtype=dtype)
        return cls(columns, torch.zeros((), device=device, dtype=torch.float64), rank, tail)

    @property
    def size(self) -> int:
        return len(self.columns)

    @property
    def width(self) -> int:
        """How many columns to keep while rows arrive."""
        return min(2 * self.rank, len(self.columns))

    def update(self, rows: torch.Tensor) -> torch.Tensor:
        """Add `rowsᵀ rows`, for rows of shape `(n, d)`, and return its trace in float64."""
        energy = self.add_energy(rows)
        add_rows({self: [rows]})
        return energy

    def add_energy(self, rows: torch.Tensor) -> torch.Tensor:
        """Add and return the trace of `rowsᵀ rows`, as `update` does; `add_rows` adds the rest."""
        energy = torch.linalg.vector_norm(rows, dtype=torch.float64).square()
        self.trace = self.trace + energy
        return energy

    def __add__(self, other: LowRankFactor) -> LowRankFactor:
        columns = torch.cat([self.columns, other.columns], dim=1)
        return LowRankFactor(
            _leading(columns, self.width), self.trace + other.trace, self.rank, self.tail
        )

    def __mul__(self, scalar: float | torch.Tensor) -> LowRankFactor:
        return LowRankFactor(self.columns * scalar**0.5, self.trace * scalar, self.rank, self.tail)

    def cut(self) -> LowRankFactor:
        """The same factor with no more columns than its rank."""
        columns = _leading(self.columns, min(self.rank, self.size))
        return LowRankFactor(columns, self.trace, self.rank, self.tail)

    def eigendecomposition(self) -> Eigendecomposition:
        """The leading `rank` eigenvectors, and the mean of the other eigenvalues."""
        vectors, singular_values, _ = torch.linalg.svd(self.columns.double(), full_matrices=False)
        vectors, values = vectors[:, : self.rank], singular_values[: self.rank].square()
        left_out = self.size - len(values)
        tail = self.trace.new_zeros(())
        if self.tail and left_out:
            tail = (self.trace - values.sum()).clamp_min(0) / left_out
        dtype = self.columns.dtype
        return Eigendecomposition(vectors.to(dtype), values.to(dtype), tail.to(dtype))

    def to_matrix(self) -> torch.Tensor:
        """Dense `(d, d)` matrix, cut to the rank, with its tail. For tests."""
        vectors, values, tail = self.eigendecomposition()
        complement = torch.eye(self.size).to(vectors) - vectors @ vectors.mT
        return (vectors * values) @ vectors.mT + tail * complement


Factor = DenseFactor | LowRankFactor


def add_rows(waiting: Mapping[LowRankFactor, Sequence[torch.Tensor]]) -> None:
    """Add `rowsᵀ rows` to large factors, without its trace; factors of one shape go together.

    Parameters
    ----------
    waiting : mapping of LowRankFactor to sequence of torch.Tensor
        rows of shape `(n, d)` for each factor
    """
    alike: dict[tuple[Any, ...], list[tuple[LowRankFactor, torch.Tensor]]] = {}
    for factor, parts in waiting.items():
        rows = torch.cat(list(parts))
        columns = factor.columns
        shapes = (columns.shape, rows.shape, factor.width, columns.device, columns.dtype)
        alike.setdefault(shapes, []).append((factor, rows))
    for group in alike.values():
        factors, parts = zip(*group, strict=True)
        columns = torch.stack([factor.columns for factor in factors])
        for chunk in torch.stack(parts).split(_CHUNK, dim=1):
            columns = _leading(torch.cat([columns, chunk.mT], dim=-1), factors[0].width)
        for factor, own in zip(factors, columns, strict=True):
            factor.columns = own


def _leading(columns: torch.Tensor, width: int) -> torch.Tensor:
    """Rotate `(..., d, n)` columns onto their leading `width` left singular directions.

    The rotation comes from the columns' Gram matrix: from all of its eigenvectors if there are few,
    otherwise from a subspace that holds the leading ones.
    """
    n = columns.shape[-1]
    if n <= width:
        return columns
    gram = (columns.mT @ columns).double()
    if n <= width + _OVERSAMPLING:
        _, rotation = _eigh(gram)
    else:
        basis = _dominant_subspace(gram, width)
        _, rotation = _eigh(basis.mT @ gram @ basis)
        rotation = basis @ rotation
    return columns @ rotation[..., rotation.shape[-1] - width :].to(columns.dtype)


def _dominant_subspace(gram: torch.Tensor, width: int) -> torch.Tensor:
    """Orthonormal columns that span the leading `width` eigenvectors and a few more.

    Two steps of subspace iteration from a fixed random start (Halko, Martinsson & Tropp, 2011).
    Exact if the matrix has no higher rank than there are columns.
    """
    start = _start(width, gram.device)[: gram.shape[-1]]
    return torch.linalg.qr(gram @ (gram @ start)).Q


@lru_cache
def _start(width: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = _CHUNK + 2 * width, width + _OVERSAMPLING
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)


def _eigh(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ascending eigenvalues and eigenvectors of a positive semi-definite matrix, in float64."""
    matrix = matrix.double()
    try:
        return torch.linalg.eigh(matrix)
    # eigh does not converge for some matrices with many equal eigenvalues.
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        vectors, values, _ = torch.linalg.svd(matrix)
        return values.flip(-1), vectors.flip(-1)
