"""Predictors of tokens: the trained model, and draws around it, ours and rivals'."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.methods import sampled
from benchmarks.methods.method import fit_temperature
from benchmarks.models import AdaptedModel
from laplace_lora_ext import LowRankKronLoRALaplace
from laplace_lora_ext.models.batches import IGNORED
from laplace_lora_ext.tasks.language import TokensModel


def no_draws(_: Any) -> Iterable[Tensor]:
    """Draw nothing: the trained model predicts alone."""
    return ()


@dataclass(frozen=True)
class Predictor:
    """Predicts labelled tokens' logits by the trained model and by each draw."""

    la: LowRankKronLoRALaplace
    draws: Callable[[Any], Iterable[Tensor]] = no_draws
    temperature: float = 1.0
    is_posterior: bool = False

    @torch.no_grad()
    def __call__(
        self,
        batch: Any,
    ) -> tuple[Tensor, Iterable[Tensor], Tensor]:
        """Compute logits `(N, V)`, those of each draw, and the labels `(N,)`."""
        logits, tokens = tokens_of(self.la, batch)
        tempered = logits / self.temperature
        # Draws come one by one, when they are read: all of them are much.
        return tempered, self.draws(batch), tokens


def tokens_of(la: LowRankKronLoRALaplace, batch: Any) -> tuple[Tensor, Tensor]:
    """Compute the trained model's logits `(N, V)`, and find the labels `(N,)`."""
    (logits,) = la.draw_logits(batch, n_samples=0)
    return logits, labels_of(la.model, batch)


def labels_of(model: Any, batch: Any) -> Tensor:
    """Find the tokens `(N,)` that a batch's logits predict."""
    targets = model.targets(batch)
    return targets[targets != IGNORED]


class Writer(AdaptedModel):
    """A model whose classes are all tokens, at each labelled place."""

    @cached_property
    def logits_model(self) -> TokensModel:
        """Return what maps a batch to logits (labelled places, tokens)."""
        return TokensModel(self.model)


def scaled(la: LowRankKronLoRALaplace, validation: Iterable[Any]) -> Predictor:
    """Predict with the model, at the temperature that validation texts prefer."""
    logits = []
    tokens = []
    for batch in validation:
        logits_of_batch, tokens_of_batch = tokens_of(la, batch)
        logits.append(logits_of_batch)
        tokens.append(tokens_of_batch)
    labels = torch.cat(tokens)
    temperature = fit_temperature(torch.cat(logits), labels)
    return Predictor(la, temperature=temperature)


def posterior(la: LowRankKronLoRALaplace, draws: int) -> Predictor:
    """Predict with draws from the posterior as it is now."""

    def of_draws(batch: Any) -> Tensor:
        # The same for every batch.
        same = torch.Generator().manual_seed(0)
        return la.draw_logits(batch, draws, same)

    return Predictor(la, of_draws, is_posterior=True)


def training_free(
    la: LowRankKronLoRALaplace,
    draws: int,
    texts: list[Any],
) -> Predictor:
    """Predict by TFB: as much noise as changes 1 % of the training tokens."""
    writer = Writer(la.model.model)
    members = sampled.training_free(writer, texts, draws=draws)

    @torch.no_grad()
    def of_draws(batch: Any) -> Iterator[Tensor]:
        for logits_of in members.logits():
            yield logits_of(batch)

    return Predictor(la, of_draws)


def token_loss(model: Any, batch: Any) -> Tensor:
    """Compute a batch's mean loss of labelled tokens."""
    # The model gives logits for labelled places alone.
    return cross_entropy(model(batch), labels_of(model, batch))
