"""Predictors of tokens: the trained model, and draws around it, ours and rivals'."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.methods import sampled
from benchmarks.methods.method import fit_temperature
from benchmarks.models import AdaptedModel
from laplace_lora_ext.language_model import LanguageModelLaplace
from laplace_lora_ext.models.tokens_model import TokensModel
from laplace_lora_ext.models.weights import called_with
from laplace_lora_ext.text.scores import drawn


@dataclass(frozen=True)
class Predictor:
    """Predicts a batch's labelled tokens: logits of the trained model and of every draw."""

    la: LanguageModelLaplace
    draws: Callable[[Any], Iterable[torch.Tensor]] = lambda _: ()
    temperature: float = 1.0
    is_posterior: bool = False

    @torch.no_grad()
    def __call__(self, batch: Any) -> tuple[torch.Tensor, Iterable[torch.Tensor], torch.Tensor]:
        """Logits `(N, V)`, those of each draw, and the labels `(N,)`."""
        f, tokens = self.la.tokens(batch)
        return f / self.temperature, self.draws(batch), tokens


class Writer(AdaptedModel):
    """A model whose classes are all tokens, at each labelled place."""

    @cached_property
    def logits_model(self) -> TokensModel:
        return TokensModel(self.model)


def scaled(la: LanguageModelLaplace, validation: Iterable[Any]) -> Predictor:
    """The model with the temperature that validation texts prefer."""
    found = [la.tokens(batch) for batch in validation]
    logits, tokens = (torch.cat(part) for part in zip(*found, strict=True))
    return Predictor(la, temperature=fit_temperature(logits, tokens))


def posterior(la: LanguageModelLaplace, draws: int) -> Predictor:
    """The posterior as it is now."""
    values = list(drawn(la, draws, 0))

    def of_draws(batch: Any) -> Iterator[torch.Tensor]:
        return (called_with(la.model, la.blocks, each, batch) for each in values)

    return Predictor(la, of_draws, is_posterior=True)


def training_free(la: LanguageModelLaplace, draws: int, texts: list[Any]) -> Predictor:
    """TFB: the most noise that changes at most 1 % of the training texts' tokens."""
    members = sampled.training_free(Writer(la.model.model), texts, draws=draws)

    @torch.no_grad()
    def logits(batch: Any) -> Iterator[torch.Tensor]:
        yield from (logits_of(batch) for logits_of in members.logits())

    return Predictor(la, logits)


def token_loss(model: Any, batch: Any) -> torch.Tensor:
    """Mean loss of a batch's labelled tokens; the model gives logits for these alone."""
    targets = model.targets(batch)
    return cross_entropy(model(batch), targets[targets != -100])
