"""Features of many examples, in parts: products with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from laplace_lora_ext.linearized.gram import Gram
from laplace_lora_ext.linearized.storage import Stored

_ROWS = 1024  # of all outputs of some examples, which are in double precision at once


class Features:
    """Φ, `(N, C, F)`. Results are in float64, of products in Φ's own precision.

    Parameters
    ----------
    stored : Stored
        `(N, C, F)`
    """

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self.n_examples, self.n_outputs, self.n_features = stored.shape

    def some_at_a_time(self) -> Iterator[slice]:
        """Which examples fit into memory together."""
        size = max(1, _ROWS // self.n_outputs)
        for start in range(0, self.n_examples, size):
            yield slice(start, min(start + size, self.n_examples))

    def parts(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Some examples at a time, and which they are."""
        for part in self.some_at_a_time():
            yield part, self._stored[part]

    def times(self, weights: torch.Tensor) -> torch.Tensor:
        """`Φ w` of `(F,)` weights, `(N, C)`."""
        weights = weights.to(self._stored.dtype)
        # In one piece: small results among large parts would keep these' memory from being reused.
        result = torch.empty(self.n_examples, self.n_outputs, dtype=torch.float64)
        for part, features in self.parts():
            result[part] = features @ weights
        return result

    def transposed_times(self, values: torch.Tensor) -> torch.Tensor:
        """`Φᵀ x` of `(N, C)` numbers, or of `(k, N, C)`: `(F,)` or `(k, F)`."""
        result = torch.zeros(*values.shape[:-2], self.n_features, dtype=torch.float64)
        for part, features in self.parts():
            chosen = values[..., part, :].to(features).flatten(-2)
            result += chosen @ features.flatten(0, 1)
        return result

    def normal_product(self, roots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`Σ_n Φ_nᵀ A_nᵀ A_n Φ_n w` of `(N, S, C)` roots A and `(F,)` weights, in one pass."""
        result = torch.zeros(self.n_features, dtype=torch.float64)
        weights = weights.to(self._stored.dtype)[:, None]
        for part, features in self.parts():
            A = roots[part].to(features)
            values = A.mT @ (A @ (features @ weights))
            result += values.flatten() @ features.flatten(0, 1)
        return result

    def gram(self, roots: Callable[[slice], torch.Tensor]) -> Gram:
        """`Σ_n Φ_nᵀ A_nᵀ A_n Φ_n` of A, of which a function gives those of some examples."""

        def parts() -> Iterator[torch.Tensor]:
            return (
                (roots(part).to(features) @ features).flatten(0, 1)
                for part, features in self.parts()
            )

        n_rows = self.n_examples * roots(slice(0, 1)).shape[1]
        return Gram(parts, n_rows, self.n_features)
