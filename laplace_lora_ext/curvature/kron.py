"""Sums over data: Kronecker factors, small dense ones and large low-rank ones.

Both sum outer products of rows that arrive batch by batch. A prior is added to a
`LowRankKronDecomposed`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from laplace_lora_ext.curvature.decomposed import DecomposedBlock

LinAlgError = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]

# Rows in one step of the streaming update.
_CHUNK = 1024
# Directions that subspace iteration carries beyond the ones it returns.
_OVERSAMPLING = 10


@dataclass(eq=False)
class KroneckerBlock:
    """Curvature of one LoRA weight `(m, n)` in sum form: `F_out ⊗ F_in / normalizer`.

    The factor of the small side is a matrix. The large one is `columns columnsᵀ`, up to
    the energy that truncation drops. It keeps twice as many columns as the rank,
    between fits and in files too, so that it does not lose a direction early that leads
    later. The eigendecomposition cuts to the rank. No `(d, d)` matrix is ever formed.

    Yang et al. (ICLR 2024), algorithm 1, for the update.
    """

    small_output: bool  # whether the small factor is F_out, and not F_in
    matrix: Tensor  # (r, r)
    columns: Tensor  # (d, w) with w <= min(2 * rank, d)
    trace: Tensor  # (), float64, of the large factor: exact despite the truncation
    normalizer: Tensor  # (), float64: both factors sum over the data
    rank: int  # how many eigenvectors to keep in the end (the paper's `n_kfac`)
    # Whether directions beyond it keep the mean of their eigenvalues, or none.
    tail: bool

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
        r, d = shape if small_output else reversed(shape)
        matrix = torch.zeros(r, r, device=device, dtype=dtype)
        none = matrix.new_zeros((), dtype=torch.float64)
        columns = matrix.new_zeros(d, 0)
        return cls(small_output, matrix, columns, none, none, rank, tail)

    @classmethod
    def from_state_dict(
        cls, state: dict[str, Any], device: torch.device, dtype: torch.dtype
    ) -> KroneckerBlock:
        """Rebuild what `state_dict` returned; sums of squares stay in float64."""
        here = {name: state[name].to(device) for name in ("trace", "normalizer")}
        here |= {name: state[name].to(device, dtype) for name in ("matrix", "columns")}
        return cls(**state | here)

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and numbers alone, by the names of the fields."""
        return dict(vars(self))

    @property
    def width(self) -> int:
        """Say how many columns to keep."""
        return min(2 * self.rank, len(self.columns))

    @property
    def nbytes(self) -> int:
        """Count the memory of the large factor once it has all its columns."""
        return len(self.columns) * self.width * self.columns.element_size()

    def __add__(self, other: KroneckerBlock) -> KroneckerBlock:
        """Add factors as if all data had been seen in one run."""
        # Append columns, and keep the leading ones.
        columns = torch.cat([self.columns, other.columns], dim=1)
        return replace(
            self,
            matrix=self.matrix + other.matrix,
            columns=_leading(columns, self.width),
            trace=self.trace + other.trace,
            normalizer=self.normalizer + other.normalizer,
        )

    def decompose(self) -> DecomposedBlock:
        """Eigendecompose both factors, in float64.

        Of the large one these are the leading `rank` eigenvectors, and the others' mean
        eigenvalue.
        """
        small, Q = _eigh(self.matrix)
        # A block without any gradient has no curvature: 0 / 0 is 0 here.
        scale = torch.where(self.normalizer > 0, 1 / self.normalizer, self.normalizer)
        small = small.clamp_min(0) * scale  # rounding may leave some below 0
        columns = self.columns.double()
        U, singular_values, _ = torch.linalg.svd(columns, full_matrices=False)
        large = singular_values[: self.rank].square()
        n_left_out = len(columns) - len(large)
        tail = self.trace.new_zeros(())
        if self.tail and n_left_out:
            energy_left_out = self.trace - large.sum()
            tail = energy_left_out.clamp_min(0) / n_left_out
        numbers = Q, small, U[:, : self.rank], large, tail
        dtype = self.columns.dtype
        return DecomposedBlock(self.small_output, *(each.to(dtype) for each in numbers))


class StreamingUpdates:
    """Adds rows to Kronecker factors, updating many large factors at once.

    Updating a large factor takes a dozen operations on small matrices, and time goes by
    their number rather than their size. So rows wait until there are `limit` bytes of
    them; then factors of one shape go together.

    Rows that are not finite make the factor's trace so, and are not added, as an
    eigendecomposition would fail on them. Whoever adds rows looks at the traces once a
    batch: each look at a number on an accelerator waits for all work there.
    """

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        self._waiting: dict[KroneckerBlock, list[Tensor]] = {}
        self._bytes = 0

    def add(self, block: KroneckerBlock, rows: Tensor, of_outputs: bool) -> Tensor:
        """Add `rowsᵀ rows`, of rows `(n, d)`, to a factor, or at the next `finish`.

        Its trace is summed in float64.
        """
        if of_outputs == block.small_output:
            product = rows.mT @ rows
            block.matrix = block.matrix + product
            return product.trace().double()
        # In float64 from the start it would take seven times as long.
        norms = torch.linalg.vector_norm(rows, dim=1).double()
        energy = norms.square().sum()
        block.trace = block.trace + energy
        self._waiting.setdefault(block, []).append(rows)
        self._bytes += rows.nbytes
        if self._bytes >= self._limit:
            self.finish()
        return energy

    @torch.no_grad()  # rows may be views of inputs that require a gradient
    def finish(self) -> None:
        """Add all waiting rows."""
        # Whatever fails below, no rows are added twice.
        waiting, self._waiting = self._waiting, {}
        self._bytes = 0
        groups: defaultdict[Any, list[KroneckerBlock]] = defaultdict(list)
        for block, parts in waiting.items():
            columns = block.columns
            n_rows = sum(map(len, parts))
            key = columns.shape, n_rows, columns.device, columns.dtype
            groups[key].append(block)
        for blocks in groups.values():
            traces = torch.stack([block.trace for block in blocks])
            if not traces.isfinite().all():
                continue
            # Joined as rows, which lie beside each other in memory: each block's
            # columns so far, and what is added to them.
            parts: list[Tensor] = []
            for block in blocks:
                parts += [block.columns.mT, *waiting[block]]
            rows = torch.cat(parts).unflatten(0, (len(blocks), -1))
            updated = _leading_of(rows, blocks[0].width)
            for block, columns in zip(blocks, updated, strict=True):
                block.columns = columns


def _leading_of(rows: Tensor, width: int) -> Tensor:
    """Return columns `(blocks, d, width)` whose factors lead those of `(blocks, n, d)`.

    Beside them a step has the columns of the steps before.
    """
    columns = rows[:, :0].mT
    for chunk in rows.split(_CHUNK, dim=1):
        columns = _leading(torch.cat([columns.mT, chunk], dim=1).mT, width)
    return columns


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
