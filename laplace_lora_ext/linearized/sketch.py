"""Random features of Jacobians, whose inner products are those of the Jacobians on average."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Sketch:
    """Multiplies the large side of each block's Jacobian with a random matrix.

    With Ω of s columns of independent normal numbers of variance 1 / s, `E[Ω Ωᵀ] = I`, so that
    `⟨G Ω, G' Ω⟩` has the expectation `⟨G, G'⟩`. A large side of no more than s rows stays as it is.
    The blocks have the shapes `(r, d)`, and about `n_features` numbers are left of the Jacobian of
    an output in all of them.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        n_features: int,
        device: torch.device,
        dtype: torch.dtype,
        generator: torch.Generator | None = None,
    ) -> None:
        columns = max(1, n_features // sum(small for small, _ in shapes))
        source = device if generator is None else generator.device
        self._matrices = [
            torch.randn(large, columns, generator=generator, device=source).to(device, dtype)
            / columns**0.5
            if columns < large
            else None
            for _, large in shapes
        ]
        sizes = torch.tensor([small * min(columns, large) for small, large in shapes])
        self.feature_block = torch.arange(len(shapes)).repeat_interleave(sizes)

    def __call__(self, index: int, jacobian: torch.Tensor) -> torch.Tensor:
        """Features `(B, C, features)` of a block's Jacobians `(B, C, r, d)`."""
        matrix = self._matrices[index]
        return (jacobian if matrix is None else jacobian @ matrix).flatten(2)
