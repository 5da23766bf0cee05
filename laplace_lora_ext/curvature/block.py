"""Curvature of one LoRA weight: a Kronecker product of a small and a large factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from laplace_lora_ext.curvature.factors import (
    DenseFactor,
    Eigendecomposition,
    Factor,
    LowRankFactor,
)


@dataclass(eq=False)
class KroneckerBlock:
    """Curvature of one LoRA weight `(m, n)` in sum form: `F_out ⊗ F_in / normalizer`.

    Exactly one of the two is a `LowRankFactor`.
    """

    output_factor: Factor  # F_out, (m, m), from output gradients
    input_factor: Factor  # F_in, (n, n), from inputs
    normalizer: torch.Tensor  # (), float64: both factors sum over the data

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
        """Empty sums for a weight of the given shape, one side of which is the LoRA rank."""
        small, large = shape if small_output else shape[::-1]
        dense = DenseFactor.zeros(small, device, dtype)
        low_rank = LowRankFactor.zeros(large, rank, tail, device, dtype)
        factors = (dense, low_rank) if small_output else (low_rank, dense)
        return cls(*factors, torch.zeros((), device=device, dtype=torch.float64))

    @classmethod
    def from_state_dict(
        cls, state: dict[str, Any], device: torch.device, dtype: torch.dtype
    ) -> KroneckerBlock:
        """Rebuild what `state_dict` returned; sums of squares stay in float64."""
        factors: list[Any] = []
        for factor in (state["output_factor"], state["input_factor"]):
            if "matrix" in factor:
                factors.append(DenseFactor(factor["matrix"].to(device, dtype)))
            else:
                columns, trace = factor["columns"].to(device, dtype), factor["trace"].to(device)
                factors.append(LowRankFactor(**factor | {"columns": columns, "trace": trace}))
        return cls(factors[0], factors[1], state["normalizer"].to(device))

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers, ready for `torch.save`."""
        return {
            "output_factor": dict(vars(self.output_factor)),
            "input_factor": dict(vars(self.input_factor)),
            "normalizer": self.normalizer,
        }

    def __add__(self, other: KroneckerBlock) -> KroneckerBlock:
        return KroneckerBlock(
            self.output_factor + other.output_factor,  # pyright: ignore[reportOperatorIssue]
            self.input_factor + other.input_factor,  # pyright: ignore[reportOperatorIssue]
            self.normalizer + other.normalizer,
        )

    def decompose(self) -> DecomposedBlock:
        """Eigendecompose both factors."""
        output = self.output_factor.eigendecomposition()
        input_ = self.input_factor.eigendecomposition()
        small_output = isinstance(self.output_factor, DenseFactor)
        small, large = (output, input_) if small_output else (input_, output)
        # A block without any gradient has no curvature: 0 / 0 is 0 here.
        scale = torch.where(self.normalizer > 0, 1 / self.normalizer, self.normalizer)
        small = small._replace(values=(small.values * scale).to(small.values.dtype))
        return DecomposedBlock(small, large, small_output)


@dataclass(eq=False)
class DecomposedBlock:
    """Curvature of one LoRA weight in the eigenbasis of its two factors.

    With the small factor `Q diag(l) Qᵀ` and the large one `U diag(s) Uᵀ + δ (I - U Uᵀ)`, the
    matrix `λ I + F_small ⊗ F_large` has the eigenvalues `λ + l_i s_j` on `Q_i ⊗ U_j` and
    `λ + l_i δ` on `Q_i ⊗ (complement of U)`, so every power costs `O(r d k)`. This is the
    Woodbury identity of the paper's appendix E with a diagonal inner matrix.

    """

    small: Eigendecomposition  # of the factor of the LoRA rank's size
    large: Eigendecomposition
    small_output: bool  # whether the small factor belongs to outputs (`lora_A`) or inputs

    @property
    def shape(self) -> tuple[int, int]:
        """`(m, n)` of the weight."""
        small, large = len(self.small.vectors), len(self.large.vectors)
        return (small, large) if self.small_output else (large, small)

    @property
    def device(self) -> torch.device:
        return self.small.values.device

    @property
    def n_params(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def n_left_out(self) -> int:
        """How many directions of the large factor the rank leaves out."""
        return len(self.large.vectors) - len(self.large.values)

    def __mul__(self, scalar: float | torch.Tensor) -> DecomposedBlock:
        scalar = scalar.to(self.device) if isinstance(scalar, torch.Tensor) else scalar
        small = self.small._replace(values=self.small.values * scalar)
        return DecomposedBlock(small, self.large, self.small_output)

    def eigenvalues(self, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`(r, k)` eigenvalues on `Q ⊗ U` and `(r,)` on its complement, with `delta` added.

        Their precision is the higher of `delta`'s and the block's.
        """
        delta = delta.to(self.device)
        small, large, tail = (
            numbers.to(torch.promote_types(numbers.dtype, delta.dtype))
            for numbers in (self.small.values, self.large.values, self.large.tail)
        )
        return torch.outer(small, large) + delta, small * tail + delta

    def small_side_first(self, weights: torch.Tensor) -> torch.Tensor:
        """`(..., m, n)` weights as `(..., r, d)`, small side first, and back."""
        return weights if self.small_output else weights.mT

    def project(self, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Coordinates of `(..., r, d)` weights on `Q ⊗ U`, `(..., r, k)`, and what is left.

        The remainder, `(..., r, d)`, is orthogonal to U, and in the basis Q.
        """
        rotated = self.small.vectors.mT @ weights
        leading = rotated @ self.large.vectors
        if not self.n_left_out:  # rounding is no remainder
            return leading, torch.zeros_like(rotated)
        return leading, rotated - leading @ self.large.vectors.mT

    def bmm(self, weights: torch.Tensor, delta: torch.Tensor, exponent: float) -> torch.Tensor:
        """`(block + delta I) ** exponent` times each of the `(..., r, d)` weights."""
        leading, remainder = self.project(weights)
        on_leading, on_remainder = (e.pow(exponent) for e in self.eigenvalues(delta))
        return self.small.vectors @ (
            (leading * on_leading) @ self.large.vectors.mT + remainder * on_remainder[:, None]
        )

    def inv_square_form(self, weights: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """`W_a (block + delta I)⁻¹ W_bᵀ` of all pairs: `(..., K, r, d)` to `(..., K, K)`.

        Both parts are sums of squares, so the result is positive semi-definite and nothing cancels,
        however small `delta` is.
        """
        on_leading, on_remainder = (e.rsqrt() for e in self.eigenvalues(delta))
        leading, remainder = self.project(weights)
        leading = (leading * on_leading).flatten(-2)
        remainder = (remainder * on_remainder[:, None]).flatten(-2)
        return leading @ leading.mT + remainder @ remainder.mT

    def diag(self, delta: torch.Tensor, exponent: float) -> torch.Tensor:
        """Diagonal of `(block + delta I) ** exponent`, `(m * n,)`."""
        on_leading, on_remainder = (e.pow(exponent) for e in self.eigenvalues(delta))
        small, large = self.small.vectors.square(), self.large.vectors.square()
        diagonal = small @ on_leading @ large.mT
        if self.n_left_out:
            diagonal = diagonal + torch.outer(small @ on_remainder, 1 - large.sum(1))
        return self.small_side_first(diagonal).flatten()
