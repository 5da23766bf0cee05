"""Turns of logits that share a text, so that each has gradients of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from laplace_lora_ext.likelihoods import Seeds
from laplace_lora_ext.models.batches import Positions


@dataclass(frozen=True)
class Turns:
    """Back-propagates one row of logits of each text at a time.

    Attributes
    ----------
    owners : torch.Tensor
        `(N,)`, the text of each row
    numbers : torch.Tensor
        `(N,)`, in which turn each row has its vectors: its number among those of its
        text
    n_texts : int
        B
    n_turns : int
        as many as the text with the most rows has
    """

    owners: torch.Tensor
    numbers: torch.Tensor
    n_texts: int
    n_turns: int

    @classmethod
    def of(cls, positions: Positions) -> Turns | None:
        """Let the rows of a batch take turns; None where each text has one row."""
        owners = positions.owners_of_logits
        if owners is None:
            return None
        counts = owners.bincount(minlength=positions.n_examples)
        firsts = counts.cumsum(0) - counts
        # The rows of a text follow each other.
        numbers = torch.arange(len(owners), device=owners.device) - firsts[owners]
        return cls(owners, numbers, positions.n_examples, int(counts.max()))

    def vectors(self, of_rows: torch.Tensor) -> torch.Tensor:
        """Spread vectors `(S, N, C)` over the turns, `(turns S, N, C)`."""
        turns = torch.arange(self.n_turns, device=self.numbers.device)
        has_turn = (self.numbers == turns[:, None]).to(of_rows)
        return (has_turn[:, None, :, None] * of_rows).flatten(0, 1)

    def seeds(self, of_rows: Seeds) -> Seeds:
        """Spread seeds of rows over turns, with weights `(turns S, B)` of texts.

        Seeds with one weight for all rows belong together, and stay.
        """
        vectors, weights = of_rows
        if weights.shape[1] == 1:
            return of_rows
        of_texts = weights.new_zeros(self.n_turns, self.n_texts, len(weights))
        of_texts[self.numbers, self.owners] = weights.T
        return Seeds(self.vectors(vectors), of_texts.transpose(1, 2).flatten(0, 1))

    def of_rows(self, of_texts: torch.Tensor) -> torch.Tensor:
        """Take each row's part `(N, S, ...)` of all turns' `(B, turns S, ...)`."""
        by_turn = of_texts.unflatten(1, (self.n_turns, -1))
        return by_turn[
            self.owners.to(of_texts.device), self.numbers.to(of_texts.device)
        ]
