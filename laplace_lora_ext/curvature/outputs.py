"""What a batch's passes end in: its seeds, and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from laplace_lora_ext.likelihoods import LabelsOfTokens, Likelihood, Seeds
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.tokens_model import TokensModel


class Outputs:
    """The outputs `(N, C)` of a batch with labels."""

    def compute(self, batch: Any, own: torch.Tensor | None = None) -> torch.Tensor:
        """Compute outputs of the batch, or of one of its examples.

        Booleans `(N,)` then mark its own rows among the batch's.
        """
        raise NotImplementedError

    def seeds_and_loss(self, outputs: torch.Tensor) -> tuple[Seeds, torch.Tensor]:
        """Choose what to back-propagate for the Fisher, and sum the loss `()`.

        Labels that don't fit are refused.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Logits(Outputs):
    """The model's logits `(N, C)`."""

    model: LogitsModel
    likelihood: Likelihood
    y: torch.Tensor
    seeds: Callable[[torch.Tensor, torch.Tensor], Seeds]  # of logits and labels

    def compute(self, batch: Any, own: torch.Tensor | None = None) -> torch.Tensor:
        return self.model(batch)

    def seeds_and_loss(self, outputs: torch.Tensor) -> tuple[Seeds, torch.Tensor]:
        y = self.likelihood.check_targets(self.y, outputs)
        return self.seeds(outputs, y), self.likelihood.loss(outputs, y)


@dataclass(frozen=True)
class LabelLogProbs(Outputs):
    """Log-probabilities `(N, 1 + S)` of tokens' own labels, and of S drawn ones.

    Their gradients in the logits of a vocabulary are the slopes that Monte-Carlo and
    empirical Fishers sum, and at no time are the logits of all tokens needed. The slope
    of a drawn label averages 0 and is independent of every other token's. So the
    gradient G of a text's whole loss has `E[G Gᵀ] = Σ_t E[G_t G_tᵀ]`, the sum of its
    tokens' exact Fishers, for the price of one backward pass.
    """

    model: TokensModel
    labels: LabelsOfTokens

    def compute(self, batch: Any, own: torch.Tensor | None = None) -> torch.Tensor:
        labels = self.labels if own is None else self.labels.of(own)
        return self.model.log_probs_of(batch, labels)

    def seeds_and_loss(self, outputs: torch.Tensor) -> tuple[Seeds, torch.Tensor]:
        """Choose the drawn labels, or where none are drawn the tokens' own."""
        n_tokens, n_labels = outputs.shape
        n_draws = n_labels - 1
        chosen = torch.eye(n_labels).to(outputs)
        if n_draws > 0:
            chosen = chosen[1:]
        vectors = chosen[:, None].expand(-1, n_tokens, -1)
        weights = outputs.new_full((len(chosen), 1), len(chosen) ** -0.5)
        return Seeds(vectors, weights), -outputs[:, 0].sum()
