"""Predictors of tokens: the trained model, and draws around it, ours and rivals'."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.methods.method import fit_temperature
from benchmarks.methods.sampled import most_noise, noise_basis, noise_of
from laplace_lora_ext import LanguageModelLaplace
from laplace_lora_ext.models.weights import LoRAWeights, Values
from laplace_lora_ext.text.draws import Noise
from laplace_lora_ext.text.perturbations import Perturbation, SampledWeights, drawn_logits

Directions = Callable[[], Iterable[Values]]


@dataclass(frozen=True)
class Predictor:
    """Predicts a batch's labelled tokens: logits of the trained model and of every draw."""

    la: LanguageModelLaplace
    directions: Directions = tuple
    way: Perturbation = SampledWeights()  # noqa: RUF009 - it is frozen
    temperature: float = 1.0
    is_posterior: bool = False

    @torch.no_grad()
    def __call__(self, batch: Any) -> tuple[torch.Tensor, Iterator[torch.Tensor], torch.Tensor]:
        """Logits `(N, V)`, those of each draw, and the labels `(N,)`."""
        f, tokens = self.la.tokens(batch)
        weights = LoRAWeights(self.la.model, self.la.blocks)
        passes = partial(map, partial(weights.run, batch))
        drawn = drawn_logits(self.way, weights.values, self.directions(), passes, f)
        return f / self.temperature, drawn, tokens


def scaled(la: LanguageModelLaplace, validation: Iterable[Any]) -> Predictor:
    """The model with the temperature that validation texts prefer."""
    found = [la.tokens(batch) for batch in validation]
    logits, tokens = (torch.cat(part) for part in zip(*found, strict=True))
    return Predictor(la, temperature=fit_temperature(logits, tokens))


def posterior(la: LanguageModelLaplace, draws: int, batch: Any, linearized: bool) -> Predictor:
    """The posterior as it is now, linearised or with sampled weights."""
    precision: Any = la.posterior_precision
    noise = Noise(draws, 0)
    way = la.way(batch) if linearized else SampledWeights()
    return Predictor(la, lambda: noise.directions(precision, la.blocks), way, is_posterior=True)


def training_free(la: LanguageModelLaplace, draws: int, texts: list[Any]) -> Predictor:
    """TFB: the most noise that changes at most 1 % of the training texts' tokens."""
    weights = [block.weight.detach() for block in la.blocks]
    bases = {
        place: noise_basis(weights[place + 1])
        for place, block in enumerate(la.blocks)
        if block.matrix == "lora_A"
    }

    def with_noise(sigma: float) -> Predictor:
        noise = noise_of(sigma, bases, weights)

        def directions() -> Iterator[Values]:
            generator = torch.Generator().manual_seed(0)
            for _ in range(draws):
                drawn = noise(generator)
                yield [drawn.get(x, torch.zeros_like(w)) for x, w in enumerate(weights)]

        return Predictor(la, directions)

    def changed(sigma: float) -> float:
        predictor, away, count = with_noise(sigma), 0, 0
        for batch in texts:
            f, drawn, _ = predictor(batch)
            mixture: Any = sum(logits.softmax(-1) for logits in drawn)
            away += int((mixture.argmax(-1) != f.argmax(-1)).sum())
            count += len(f)
        return away / count

    return with_noise(most_noise(changed))


def token_loss(model: Any, batch: Any) -> torch.Tensor:
    """Mean loss of a batch's labelled tokens; the model gives logits for these alone."""
    targets = model.targets(batch)
    return cross_entropy(model(batch), targets[targets != -100])
