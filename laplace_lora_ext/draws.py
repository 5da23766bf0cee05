"""Random numbers of examples: the same in any batch, on any rank and device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Draws:
    """Draws numbers for rows of logits, by a generator of each example's own.

    Attributes
    ----------
    seed : int
    examples : torch.Tensor
        `(N,)`, the number that each row's example has in the whole data. The rows of an
        example, such as a text's tokens, follow each other
    """

    seed: int
    examples: Tensor

    def uniform(self, n_draws: int, *shape: int) -> Tensor:
        """Draw numbers from 0 to 1, `(S, N, *shape)`."""
        examples, n_rows = self.examples.unique_consecutive(return_counts=True)
        by_row: list[Tensor] = []
        for example, n_own in zip(examples.tolist(), n_rows.tolist(), strict=True):
            generator = np.random.default_rng([self.seed, example])
            numbers = generator.random((n_own, n_draws, *shape))
            by_row.append(torch.from_numpy(numbers))
        return torch.cat(by_row).transpose(0, 1)

    def signs(self, n_draws: int, *shape: int) -> Tensor:
        """Draw -1 or 1, each as often, `(S, N, *shape)`."""
        return 2 * self.uniform(n_draws, *shape).round() - 1


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw a seed for another generator; None draws from torch's own state."""
    device = None if generator is None else generator.device
    return int(torch.randint(2**31, (), generator=generator, device=device).item())
