"""All eigenvalues of a block-diagonal curvature at once."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Spectrum(NamedTuple):
    """Eigenvalues of a curvature, those of all blocks in one row.

    A prior precision only adds to eigenvalues, so these are all that a choice of prior depends on.

    Attributes
    ----------
    leading : torch.Tensor
        `(E,)`, the r x k eigenvalues that each block keeps
    leading_block : torch.Tensor
        `(E,)`, index of the block that each belongs to
    remaining : torch.Tensor
        `(F,)`, the r eigenvalues of each block on the directions that its rank leaves out
    remaining_block : torch.Tensor
        `(F,)`, index of the block that each belongs to
    multiplicity : torch.Tensor
        `(F,)`, the number of directions of each
    n_blocks : int
    """

    leading: torch.Tensor
    leading_block: torch.Tensor
    remaining: torch.Tensor
    remaining_block: torch.Tensor
    multiplicity: torch.Tensor
    n_blocks: int

    def shifted(
        self, scale: float | torch.Tensor, deltas: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Leading and remaining eigenvalues of `scale * curvature + deltas * I`.

        Parameters
        ----------
        scale : float or torch.Tensor
            `()`
        deltas : torch.Tensor
            `()`, `(1,)`, or `(blocks,)` one for each block; gives the result its dtype
        """
        deltas = deltas.expand(self.n_blocks)
        return (
            self.leading.to(deltas) * scale + deltas[self.leading_block],
            self.remaining.to(deltas) * scale + deltas[self.remaining_block],
        )

    def logdet(self, scale: float | torch.Tensor, deltas: torch.Tensor) -> torch.Tensor:
        """Log-determinant of `scale * curvature + deltas * I`, in float64."""
        leading, remaining = self.shifted(scale, deltas.double())
        return leading.log().sum() + (self.multiplicity * remaining.log()).sum()
