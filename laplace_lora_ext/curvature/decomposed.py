"""Curvature in eigenvectors, to which a prior precision can be added.

Blocks of one shape are multiplied together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class DecomposedBlock:
    """Curvature of one LoRA weight, or of several of one shape, in eigenvectors.

    With the small factor `Q diag(l) Qᵀ` and the large one `U diag(s) Uᵀ + δ (I - U
    Uᵀ)`, the matrix `λ I + F_small ⊗ F_large` has the eigenvalues `λ + l_i s_j` on `Q_i
    ⊗ U_j` and `λ + l_i δ` on `Q_i ⊗ (complement of U)`, so every power costs `O(r d
    k)`. This is the Woodbury identity of the paper's appendix E with a diagonal inner
    matrix. Of several weights all numbers have their dimension in front.
    """

    # Whether the small factor belongs to outputs (`lora_A`) or inputs.
    small_output: bool
    Q: Tensor  # (r, r), r being LoRA's rank
    small: Tensor  # (r,), the eigenvalues l, not negative
    U: Tensor  # (d, k), orthonormal columns
    large: Tensor  # (k,), the eigenvalues s, not negative
    tail: Tensor  # (), δ

    @property
    def numbers(self) -> tuple[Tensor, ...]:
        """List the tensors."""
        return self.Q, self.small, self.U, self.large, self.tail

    def __getitem__(self, place: Any) -> DecomposedBlock:
        """Take one of several, or some of them."""
        of_place = [each[place] for each in self.numbers]
        return DecomposedBlock(self.small_output, *of_place)

    @property
    def shape(self) -> tuple[int, int]:
        """Return `(m, n)` of a weight."""
        r, d = self.Q.shape[-1], self.U.shape[-2]
        return (r, d) if self.small_output else (d, r)

    @property
    def n_left_out(self) -> int:
        """Count the directions of the large factor that the rank leaves out."""
        *_, d, k = self.U.shape
        return d - k

    def eigenvalues(
        self, scale: float | Tensor, deltas: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute those of `scale * block + delta I`: `(r, k)` on `Q ⊗ U`, and beside.

        The latter are `(r,)`. Their precision is the higher of `deltas`' and the
        block's.
        """
        device = self.small.device
        deltas = deltas.to(device)
        dtype = torch.promote_types(self.small.dtype, deltas.dtype)
        if isinstance(scale, Tensor):
            scale = scale.to(device)
        small = scale * self.small.to(dtype)
        on_leading = small[..., :, None] * self.large.to(dtype)[..., None, :]
        on_remainder = small * self.tail.to(dtype)[..., None]
        return on_leading + deltas[..., None, None], on_remainder + deltas[..., None]

    def small_side_first(self, weights: Tensor) -> Tensor:
        """Turn `(..., m, n)` weights into `(..., r, d)`, small side first, and back."""
        return weights if self.small_output else weights.mT

    def project(self, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """Project weights on `Q ⊗ U`: coordinates `(..., S, r, k)`, and the remainder.

        The remainder, `(..., S, r, d)`, is orthogonal to U, and in the basis Q. It is
        None where U leaves nothing out, since rounding is no remainder. Weights are
        `(..., S, r, d)`, of several blocks `(blocks, S, r, d)`.
        """
        rotated = self.Q.mT.unsqueeze(-3) @ weights
        rows = rotated.flatten(-3, -2)
        leading = rows @ self.U
        in_rows = leading.unflatten(-2, rotated.shape[-3:-1])
        if not self.n_left_out:
            return in_rows, None
        return in_rows, (rows - leading @ self.U.mT).view_as(rotated)


@dataclass(frozen=True, eq=False)
class Power:
    """`(scale * block + delta I) ** exponent` of several blocks of one shape."""

    block: DecomposedBlock
    on_leading: Tensor  # (blocks, 1, r, k), its eigenvalues on `Q ⊗ U`
    on_remainder: Tensor  # (blocks, 1, r, 1), and beside

    def __getitem__(self, places: list[int]) -> Power:
        """Take some of the blocks."""
        on_leading, on_remainder = self.on_leading[places], self.on_remainder[places]
        return Power(self.block[places], on_leading, on_remainder)

    def _scaled(self, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        leading, remainder = self.block.project(weights)
        leading = leading * self.on_leading
        return leading, None if remainder is None else remainder * self.on_remainder

    def times(self, weights: Tensor) -> Tensor:
        """Multiply `(blocks, S, r, d)` weights."""
        leading, remainder = self._scaled(weights)
        rotated = (leading.flatten(1, 2) @ self.block.U.mT).view_as(weights)
        if remainder is not None:
            rotated = rotated + remainder
        return self.block.Q[:, None] @ rotated

    def square_form(self, weights: Tensor) -> Tensor:
        """Sum inner products of all pairs over blocks: `(B, K, K)`, of the products.

        Weights are `(blocks, B, K, r, d)`. All parts are sums of squares, so the result
        is positive semi-definite and nothing cancels, however small `delta` is.
        """
        n_examples = weights.shape[1]
        form: Any = 0
        for part in self._scaled(weights.flatten(1, 2)):
            if part is not None:
                vectors = part.unflatten(1, (n_examples, -1)).movedim(0, -3).flatten(-3)
                form = form + vectors @ vectors.mT
        return form


class Spectrum(NamedTuple):
    """Eigenvalues of a curvature, those of all blocks in one row.

    A prior precision only adds to eigenvalues, so these are all that a choice of prior
    depends on.
    """

    # (E + F,): first the E = Σ r k that blocks keep, then r of each block on the
    # directions that its rank leaves out.
    values: Tensor
    block: Tensor  # (E + F,), index of the block that each belongs to
    multiplicity: Tensor  # (E + F,), the number of directions of each
    n_blocks: int

    def equals(self, other: Spectrum) -> bool:
        """Tell whether both are of one curvature, in any place and precision."""
        mine, its = self.values.cpu(), other.values.cpu()
        if its.shape != mine.shape:
            return False
        # Another device decomposes with other rounding.
        return torch.allclose(its, mine, rtol=0.0, atol=2e-6 * mine.max().item())

    def shifted(self, scale: float | Tensor, deltas: Tensor) -> Tensor:
        """Compute the eigenvalues `(E + F,)` of `scale * curvature + deltas * I`.

        `deltas` are `()`, `(1,)` or `(blocks,)`, and give the result its dtype.
        """
        return self.values.to(deltas) * scale + deltas.expand(self.n_blocks)[self.block]

    def logdet(self, scale: float | Tensor, deltas: Tensor) -> Tensor:
        """Compute log det(`scale * curvature + deltas * I`) in float64."""
        return (self.multiplicity * self.shifted(scale, deltas.double()).log()).sum()

    @property
    def trace(self) -> Tensor:
        """Sum all eigenvalues."""
        return (self.multiplicity * self.values).sum()


@dataclass(frozen=True, eq=False)
class LowRankKronDecomposed:
    """Curvature in eigenvectors: `scale` times it, and a multiple of the identity.

    It has those methods of `laplace.utils.matrix.KronDecomposed` that the host calls.

    Parameters
    ----------
    groups : list of tuple
        indices of blocks of one shape, and these blocks together
    deltas : torch.Tensor
        `(blocks,)`, the multiple of the identity to add to each block
    scale : float or torch.Tensor, default=1.0
    """

    groups: list[tuple[list[int], DecomposedBlock]]
    deltas: Tensor
    scale: float | Tensor = 1.0

    @classmethod
    def of_blocks(
        cls, blocks: Sequence[DecomposedBlock], device: torch.device | None = None
    ) -> LowRankKronDecomposed:
        """Put blocks of one shape together, whose numbers are held once."""
        alike: dict[tuple[object, ...], list[int]] = {}
        for index, block in enumerate(blocks):
            U = block.U
            kind = block.small_output, block.Q.shape, U.shape, U.device, U.dtype
            alike.setdefault(kind, []).append(index)
        groups: list[tuple[list[int], DecomposedBlock]] = []
        for indices in alike.values():
            numbers = zip(*(blocks[index].numbers for index in indices), strict=True)
            small_output = blocks[indices[0]].small_output
            stacked = DecomposedBlock(small_output, *map(torch.stack, numbers))
            groups.append((indices, stacked))
        deltas = blocks[0].small.new_zeros(len(blocks), device=device)
        return cls(groups, deltas)

    @cached_property
    def blocks(self) -> list[DecomposedBlock]:
        """List the blocks in order, as views."""
        by_index = {
            index: block[place]
            for indices, block in self.groups
            for place, index in enumerate(indices)
        }
        return [by_index[index] for index in range(len(by_index))]

    @cached_property
    @torch.inference_mode(False)  # what is kept must not be an inference tensor
    def spectrum(self) -> Spectrum:
        """Collect the eigenvalues of all blocks in float64, without `deltas`."""
        zero = self.deltas.new_zeros((), dtype=torch.float64)
        of_blocks = [block.eigenvalues(1.0, zero) for block in self.blocks]
        n_left_out = [block.n_left_out for block in self.blocks]
        parts = [leading.flatten() for leading, _ in of_blocks]
        # There may be no directions that the remaining ones belong to.
        parts += [
            remaining if n else remaining[:0]
            for (_, remaining), n in zip(of_blocks, n_left_out, strict=True)
        ]
        counts = torch.tensor([len(part) for part in parts])
        n_blocks = len(self.blocks)
        numbers = torch.arange(n_blocks).repeat(2)
        multiplicity = torch.tensor([1] * n_blocks + n_left_out)
        return Spectrum(
            values=torch.cat([part.to(zero.device) for part in parts]),
            block=numbers.repeat_interleave(counts).to(zero.device),
            multiplicity=multiplicity.repeat_interleave(counts).to(zero),
            n_blocks=n_blocks,
        )

    @cached_property
    @torch.inference_mode(False)
    def _inverse_root(self) -> dict[int, tuple[Power, int]]:
        """Find each block's inverse root: that of its group, and its place there."""
        return {
            index: (power, place)
            for indices, power in self._power(-0.5)
            for place, index in enumerate(indices)
        }

    def _power(self, exponent: float) -> list[tuple[list[int], Power]]:
        powers: list[tuple[list[int], Power]] = []
        for indices, block in self.groups:
            leading, remaining = block.eigenvalues(self.scale, self.deltas[indices])
            on_leading = leading.pow(exponent)[:, None]
            on_remainder = remaining.pow(exponent)[:, None, :, None]
            powers.append((indices, Power(block, on_leading, on_remainder)))
        return powers

    def __add__(self, deltas: float | Tensor) -> LowRankKronDecomposed:
        """Add a multiple of the identity: a scalar, or `(blocks,)`."""
        return replace(self, deltas=self.deltas + deltas)

    def __mul__(self, scalar: float | Tensor) -> LowRankKronDecomposed:
        """Scale the curvature but not `deltas`, as the host does."""
        return replace(self, scale=self.scale * scalar)

    __radd__ = __add__
    __rmul__ = __mul__

    def logdet(self) -> Tensor:
        """Compute the log-determinant in float64, differentiable in `deltas`."""
        return self.spectrum.logdet(self.scale, self.deltas)

    def bmm(self, W: Tensor, exponent: float) -> Tensor:
        """Multiply each row of `W`, `(..., parameters)`, by `self ** exponent`."""
        sizes = [math.prod(block.shape) for block in self.blocks]
        parts = list(W.reshape(-1, W.shape[-1]).split(sizes, dim=-1))
        for indices, power in self._power(exponent):
            block = power.block
            weights = torch.stack([parts[index] for index in indices])
            weights = weights.to(block.U.device).unflatten(-1, block.shape)
            products = power.times(block.small_side_first(weights))
            products = block.small_side_first(products).flatten(-2)
            for index, product in zip(indices, products.to(W.device), strict=True):
                parts[index] = product
        return torch.cat(parts, dim=-1).reshape(W.shape)

    def inv_square_form(self, W: Tensor) -> Tensor:
        """Compute `W self⁻¹ Wᵀ`, `(B, C, C)`, for `W` of shape `(B, C, parameters)`."""
        form: Any = 0
        parts = W.split([math.prod(block.shape) for block in self.blocks], dim=-1)
        for indices, block in self.groups:
            weights = torch.stack([parts[index] for index in indices])
            weights = weights.to(block.U.device).unflatten(-1, block.shape)
            of_group = self.inv_square_form_of(indices, block.small_side_first(weights))
            form = form + of_group.to(W.device)
        return form

    def inv_square_form_of(self, indices: list[int], weights: Tensor) -> Tensor:
        """Compute `W self⁻¹ Wᵀ`, `(B, K, K)`, of some blocks of a group alone.

        Their weights W are `(blocks, B, K, r, d)`.
        """
        powers, places = zip(*(self._inverse_root[i] for i in indices), strict=True)
        power = powers[0]
        if places != tuple(range(len(power.on_leading))):
            power = power[list(places)]
        return power.square_form(weights)

    def to_matrix(self, exponent: float = 1) -> Tensor:
        """Make the dense matrix of `self ** exponent`; for tests."""
        n_params = sum(math.prod(block.shape) for block in self.blocks)
        return self.bmm(torch.eye(n_params).to(self.deltas), exponent)


def trace_of(curvature: Any) -> float:
    """Return the trace of a posterior's curvature, of any structure."""
    if isinstance(curvature, LowRankKronDecomposed):
        return curvature.spectrum.trace.item()
    return diagonal_of(curvature).double().sum().item()


def diagonal_of(curvature: Any) -> Tensor:
    """Take the diagonal of a curvature of one of the host's structures."""
    if not isinstance(curvature, Tensor):
        return curvature.diag()
    return curvature if curvature.ndim == 1 else curvature.diagonal()
