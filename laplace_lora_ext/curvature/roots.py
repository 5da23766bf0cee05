"""Inverse square roots of a precision, and what predictions make of them.

Blocks of one shape are multiplied together: of a small text, each product of matrices
takes longer to start than to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_lora_ext.curvature.block import DecomposedBlock

# Of Jacobians that wait for those of other blocks: 16 MB in float32.
_NUMBERS = 2**22


@dataclass(frozen=True, eq=False)
class _Roots:
    """`(block + delta I) ** -0.5` of n blocks `(r, d)`, in their eigenbases."""

    small: Tensor  # Q, (n, r, r)
    large: Tensor  # U, (n, d, k)
    on_leading: Tensor  # (n, r, k)
    on_remainder: Tensor | None  # (n, r, 1); None where U leaves nothing out

    @classmethod
    def of(cls, block: DecomposedBlock, delta: Tensor) -> _Roots:
        """Make the root of one block."""
        on_leading, on_remainder = block.eigenvalues(delta)
        of_remainder = on_remainder.rsqrt()[None, :, None]
        return cls(
            block.small.vectors[None],
            block.large.vectors[None],
            on_leading.rsqrt()[None],
            of_remainder if block.n_left_out else None,
        )

    @classmethod
    def stacked(cls, roots: Sequence[_Roots]) -> _Roots:
        """Put roots of blocks of one shape together."""
        # Blocks of one shape leave out as many directions, or all of them none.
        remainders = [r.on_remainder for r in roots if r.on_remainder is not None]
        return cls(
            torch.cat([each.small for each in roots]),
            torch.cat([each.large for each in roots]),
            torch.cat([each.on_leading for each in roots]),
            torch.cat(remainders) if remainders else None,
        )

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what blocks must have in common to be stacked."""
        shape = self.large.shape
        return self.small.shape, shape, self.large.device, self.large.dtype

    def square_form(self, weights: Tensor) -> Tensor:
        """Sum `W_a (block + delta I)⁻¹ W_bᵀ` of all pairs over the blocks.

        From `(n, ..., K, r, d)` to `(..., K, K)`.

        All parts are sums of squares, so the result is positive semi-definite and
        nothing cancels, however small `delta` is.
        """
        leading, remainder = self._scaled(weights)
        form = _gram(leading)
        return form if remainder is None else form + _gram(remainder)

    def times(self, weights: Tensor) -> Tensor:
        """Multiply `(n, S, r, d)` weights by the roots."""
        leading, remainder = self._scaled(weights)
        rotated = leading @ self.large.mT[:, None]
        if remainder is not None:
            rotated = rotated + remainder
        return self.small[:, None] @ rotated

    def _scaled(self, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scale coordinates on `Q ⊗ U`, `(n, ..., r, k)`, and what U leaves out.

        The second, `(n, ..., r, d)`, is in the basis Q and orthogonal to U.
        """
        *before, r, d = weights.shape
        n, k = len(self.large), self.large.shape[-1]
        in_between = [1] * (weights.ndim - 3)
        rotated = self.small.mT[:, None] @ weights.flatten(1, -3)
        rows = rotated.flatten(1, 2)
        on_leading = rows @ self.large
        leading = on_leading.reshape(*before, r, k)
        leading = leading * self.on_leading.reshape(n, *in_between, r, k)
        if self.on_remainder is None:  # rounding is no remainder
            return leading, None
        remainder = (rows - on_leading @ self.large.mT).reshape(*before, r, d)
        return leading, remainder * self.on_remainder.reshape(n, *in_between, r, 1)


def _gram(coordinates: Tensor) -> Tensor:
    """Multiply all pairs of n blocks' `(n, ..., K, r, k)`: `(..., K, K)`."""
    vectors = coordinates.movedim(0, -3).flatten(-3)
    return vectors @ vectors.mT


class InverseRoots:
    """The inverse root of a block-diagonal precision."""

    def __init__(self, blocks: Sequence[DecomposedBlock], deltas: Tensor) -> None:
        self._blocks = blocks
        self.of_blocks = [
            _Roots.of(block, delta) for block, delta in zip(blocks, deltas, strict=True)
        ]
        alike: dict[tuple[object, ...], list[int]] = {}
        for index, roots in enumerate(self.of_blocks):
            alike.setdefault(roots.kind, []).append(index)
        self.groups = [
            (indices, _Roots.stacked([self.of_blocks[index] for index in indices]))
            for indices in alike.values()
        ]
        self.group_of = {
            index: number
            for number, (indices, _) in enumerate(self.groups)
            for index in indices
        }

    def times(self, weights: Tensor) -> Tensor:
        """Multiply `(S, parameters)` weights, whose blocks are `(m, n)` each."""
        parts = list(weights.split([block.n_params for block in self._blocks], dim=-1))
        for indices, roots in self.groups:
            of_group = [
                self._blocks[i].small_side_first(
                    parts[i].to(roots.large.device).unflatten(-1, self._blocks[i].shape)
                )
                for i in indices
            ]
            products = roots.times(torch.stack(of_group))
            for i, product in zip(indices, products, strict=True):
                product = self._blocks[i].small_side_first(product)
                parts[i] = product.flatten(-2).to(weights.device)
        return torch.cat(parts, dim=-1)


class SquareForm:
    """Sums `W P⁻¹ Wᵀ` over blocks, in whichever order their weights come."""

    def __init__(self, roots: InverseRoots) -> None:
        self._roots = roots
        self._waiting: list[dict[int, Tensor]] = [{} for _ in roots.groups]
        self._n_waiting = 0  # numbers
        self._sum: Tensor | None = None

    def add(self, index: int, weights: Tensor) -> None:
        """Take a block's weights `(..., K, r, d)`."""
        number = self._roots.group_of[index]
        waiting = self._waiting[number]
        waiting[index] = weights
        self._n_waiting += weights.numel()
        indices, roots = self._roots.groups[number]
        if len(waiting) == len(indices):
            together = torch.stack([waiting.pop(i) for i in indices])
            self._n_waiting -= together.numel()
            self._add(roots.square_form(together))
        elif self._n_waiting > _NUMBERS:
            self._flush()

    def total(self) -> Tensor:
        """Return the sum `(..., K, K)` over all that was added."""
        self._flush()
        assert self._sum is not None
        return self._sum

    def _flush(self) -> None:
        for waiting in self._waiting:
            for index, weights in waiting.items():
                self._add(self._roots.of_blocks[index].square_form(weights[None]))
            waiting.clear()
        self._n_waiting = 0

    def _add(self, form: Tensor) -> None:
        self._sum = form if self._sum is None else self._sum + form.to(self._sum.device)
