"""What a batch tells about the rows that layers see."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Positions(NamedTuple):
    """Examples and positions of a batch.

    Attributes
    ----------
    n_examples : int
        B, also the number of rows of logits unless `owners_of_logits` says otherwise
    n_rows : int
        rows of the model's input: B, or a multiple where an example is several sequences
    length : int or None
        T, positions of a row, where known
    mask : torch.Tensor or None
        `(B, n_rows / B * T)` booleans, false at padding; None where nothing is padded
    mixed : bool
        whether an example may have several rows, or rows of several kinds, such as images beside
        tokens; then contents, not sizes, say which rows belong to which example
    owners_of_logits : torch.Tensor or None
        `(N,)` index of the example that each row of logits belongs to, where examples have several
    """

    n_examples: int
    n_rows: int
    length: int | None
    mask: torch.Tensor | None
    mixed: bool = False
    owners_of_logits: torch.Tensor | None = None

    def logits_of(self, examples: torch.Tensor) -> torch.Tensor:
        """Values `(..., B)` of the examples, repeated for each of their rows of logits."""
        owners = self.owners_of_logits
        return examples if owners is None else examples[..., owners.to(examples.device)]

    @property
    def n_tokens(self) -> int | None:
        """Positions of all rows together, where known."""
        return None if self.length is None else self.n_rows * self.length

    def valid(self, n_positions: int) -> torch.Tensor | None:
        """`(B, n_positions)` mask for a layer that sees so many positions of each example.

        None where all of them are valid, as after pooling.

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
                f"it sees {n_positions} positions of each example, but the attention_mask has "
                f'{self.mask.shape[1]}: use kfac_approx="gradient", which needs no mask'
            )
        return self.mask
