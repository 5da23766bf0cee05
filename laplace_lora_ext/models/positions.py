"""Which rows that a layer sees belong to which example of a batch."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Positions(NamedTuple):
    """How the rows that a layer sees belong to the examples of a batch.

    Attributes
    ----------
    n_examples : int
        B, rows of the logits
    n_rows : int
        rows of the model's input: B, or a multiple where an example is several sequences
    length : int or None
        T, positions of a row, where known
    mask : torch.Tensor or None
        `(B, n_rows / B * T)` booleans, false at padding; None where nothing is padded
    """

    n_examples: int
    n_rows: int
    length: int | None
    mask: torch.Tensor | None

    def arrange(self, rows: torch.Tensor, n_leading: int = 0) -> torch.Tensor:
        """Reshape what a layer has seen or returned, `(..., d)`, to `(B, positions, d)`.

        So many leading dimensions, such as one of seeds, stay as they are.

        Raises
        ------
        NotImplementedError
            If the leading dimensions are not those of the batch.
        """
        leading = rows.shape[n_leading:-1]
        per_row = len(leading) >= 1 and leading[0] in {self.n_examples, self.n_rows}
        flat = self.length is not None and leading == (self.n_rows * self.length,)
        if not (per_row or flat):
            raise NotImplementedError(
                f"its rows, {tuple(rows.shape[n_leading:])}, cannot be told apart by example in a "
                f"batch of {self.n_examples}"
            )
        return rows.reshape(*rows.shape[:n_leading], self.n_examples, -1, rows.shape[-1])

    def valid(self, n_positions: int) -> torch.Tensor | None:
        """`(B, n_positions)` mask of a layer that sees as many positions of each example.

        Raises
        ------
        NotImplementedError
            If the batch is padded and the layer's positions are not those of the mask.
        """
        pooled = n_positions == self.n_rows // self.n_examples
        if self.mask is None or pooled:
            return None
        if n_positions != self.mask.shape[1]:
            raise NotImplementedError(
                f"it sees {n_positions} positions an example where the mask has "
                f'{self.mask.shape[1]}: use kfac_approx="gradient", which needs no mask'
            )
        return self.mask
