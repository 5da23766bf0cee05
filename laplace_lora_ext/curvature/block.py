"""Curvature of one LoRA weight: a Kronecker product of a small and a large factor."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
        m, n = shape
        normalizer = torch.zeros((), device=device, dtype=torch.float64)
        if small_output:
            small = DenseFactor.zeros(m, device, dtype)
            large = LowRankFactor.zeros(n, rank, tail, device, dtype)
            return cls(small, large, normalizer)
        large = LowRankFactor.zeros(m, rank, tail, device, dtype)
        small = DenseFactor.zeros(n, device, dtype)
        return cls(large, small, normalizer)

    @classmethod
    def from_state_dict(
        cls,
        state: dict[str, Any],
        device: torch.device,
        dtype: torch.dtype,
    ) -> KroneckerBlock:
        """Rebuild what `state_dict` returned; sums of squares stay in float64."""
        return cls(
            _factor_from_state_dict(state["output_factor"], device, dtype),
            _factor_from_state_dict(state["input_factor"], device, dtype),
            state["normalizer"].to(device),
        )

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
        output = self.output_factor.eigendecomposition()
        input_ = self.input_factor.eigendecomposition()
        small_output = isinstance(self.output_factor, DenseFactor)
        if small_output:
            small, large = output, input_
        else:
            small, large = input_, output
        # A block without any gradient has no curvature: 0 / 0 is 0 here.
        scale = torch.where(self.normalizer > 0, 1 / self.normalizer, self.normalizer)
        scaled = small.values * scale  # in float64
        small = small._replace(values=scaled.to(small.values.dtype))
        return DecomposedBlock(small, large, small_output)


def _factor_from_state_dict(
    state: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
) -> Factor:
    """Rebuild a factor from its attributes."""
    if "matrix" in state:
        return DenseFactor(state["matrix"].to(device, dtype))
    return LowRankFactor(
        columns=state["columns"].to(device, dtype),
        trace=state["trace"].to(device),
        rank=state["rank"],
        tail=state["tail"],
    )


@dataclass(eq=False)
class DecomposedBlock:
    """Curvature of one LoRA weight in the eigenbasis of its two factors.

    With the small factor `Q diag(l) Qᵀ` and the large one `U diag(s) Uᵀ + δ (I - U
    Uᵀ)`, the matrix `λ I + F_small ⊗ F_large` has the eigenvalues `λ + l_i s_j` on `Q_i
    ⊗ U_j` and `λ + l_i δ` on `Q_i ⊗ (complement of U)`, so every power costs `O(r d
    k)`. This is the Woodbury identity of the paper's appendix E with a diagonal inner
    matrix.
    """

    small: Eigendecomposition  # of the factor of the LoRA rank's size
    large: Eigendecomposition
    # Whether the small factor belongs to outputs (`lora_A`) or inputs.
    small_output: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Return `(m, n)` of the weight."""
        r, d = len(self.small.vectors), len(self.large.vectors)
        return (r, d) if self.small_output else (d, r)

    @property
    def device(self) -> torch.device:
        """Return where the factors are."""
        return self.small.values.device

    @property
    def n_params(self) -> int:
        """Count the weight's parameters."""
        return self.shape[0] * self.shape[1]

    @property
    def n_left_out(self) -> int:
        """Count the directions of the large factor that the rank leaves out."""
        return len(self.large.vectors) - len(self.large.values)

    def __mul__(self, scalar: float | Tensor) -> DecomposedBlock:
        """Scale the curvature."""
        if isinstance(scalar, Tensor):
            scalar = scalar.to(self.device)
        # F_small ⊗ F_large scales with either factor.
        small = self.small._replace(values=self.small.values * scalar)
        return DecomposedBlock(small, self.large, self.small_output)

    def eigenvalues(
        self,
        delta: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute eigenvalues plus `delta`: `(r, k)` on `Q ⊗ U`, `(r,)` beside it.

        Their precision is the higher of `delta`'s and the block's.
        """
        delta = delta.to(self.device)
        dtype = torch.promote_types(self.small.values.dtype, delta.dtype)
        small = self.small.values.to(dtype)
        large = self.large.values.to(dtype)
        tail = self.large.tail.to(dtype)
        on_leading = torch.outer(small, large)
        on_remainder = small * tail
        return on_leading + delta, on_remainder + delta

    def small_side_first(self, weights: Tensor) -> Tensor:
        """Turn `(..., m, n)` weights into `(..., r, d)`, small side first, and back."""
        return weights if self.small_output else weights.mT

    def project(
        self,
        weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Project `(..., r, d)` weights on `Q ⊗ U`; return coordinates and remainder.

        The remainder, `(..., r, d)`, is orthogonal to U, and in the basis Q.
        """
        rotated = self.small.vectors.mT @ weights
        leading = rotated @ self.large.vectors
        if not self.n_left_out:  # rounding is no remainder
            return leading, torch.zeros_like(rotated)
        remainder = rotated - leading @ self.large.vectors.mT
        return leading, remainder

    def bmm(
        self,
        weights: Tensor,
        delta: Tensor,
        exponent: float,
    ) -> Tensor:
        """Multiply `(..., r, d)` weights by `(block + delta I) ** exponent`."""
        leading, remainder = self.project(weights)
        on_leading, on_remainder = self.eigenvalues(delta)
        leading = leading * on_leading.pow(exponent)
        remainder = remainder * on_remainder.pow(exponent)[:, None]
        rotated = leading @ self.large.vectors.mT + remainder
        return self.small.vectors @ rotated

    def diag(
        self,
        delta: Tensor,
        exponent: float,
    ) -> Tensor:
        """Compute the diagonal of `(block + delta I) ** exponent`, `(m * n,)`."""
        on_leading, on_remainder = self.eigenvalues(delta)
        small = self.small.vectors.square()
        large = self.large.vectors.square()
        diagonal = small @ on_leading.pow(exponent) @ large.mT
        if self.n_left_out:
            rest = 1 - large.sum(1)  # diagonal of the projection on the complement of U
            diagonal = diagonal + torch.outer(small @ on_remainder.pow(exponent), rest)
        return self.small_side_first(diagonal).flatten()
