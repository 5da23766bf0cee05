"""Methods without a posterior: the model as it is, ensembles, temperature scaling."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from benchmarks.methods.method import LogitsOf, Members, labels_of
from benchmarks.models import AdaptedModel

DROPOUT_PASSES = 10
CHECKPOINTS_IN_ENSEMBLE = 3
ENSEMBLE_SIZE = 3


def as_it_is(model: AdaptedModel, validation: DataLoader) -> Members:
    return Members(lambda: iter([model.logits_model]))


def with_dropout(model: AdaptedModel, validation: DataLoader) -> Members:
    """Passes with the dropout of the training."""

    def passes() -> Iterator[LogitsOf]:
        model.model.train()
        yield from [model.logits_model] * DROPOUT_PASSES
        model.model.eval()

    return Members(passes)


def last_checkpoints(model: AdaptedModel, validation: DataLoader) -> Members:
    """The last checkpoints of one training; the last one stays."""
    steps = list(model.checkpoints)[-CHECKPOINTS_IN_ENSEMBLE:]
    return Members(lambda: (model.at(step).logits_model for step in steps))


def other_seeds(model: AdaptedModel, validation: DataLoader) -> Members:
    """Trainings that differ in their seeds, as far as this one has come."""
    assert model.another is not None
    step = max(model.checkpoints)
    others = [model.another(number).at(step) for number in range(1, ENSEMBLE_SIZE)]
    return Members(lambda: iter([member.logits_model for member in (model, *others)]))


def scaled(model: AdaptedModel, validation: DataLoader) -> Members:
    """The model with its logits divided by the temperature that validation data prefer."""
    temperature = fit_temperature(model.logits(validation), labels_of(validation))

    def logits_of(batch: Any) -> torch.Tensor:
        return model.logits_model(batch) / temperature

    return Members(lambda: iter([logits_of]), temperature)


def fit_temperature(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Find the one number by which logits are divided to minimise the NLL."""
    log_temperature = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.LBFGS([log_temperature], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Any:
        optimizer.zero_grad()
        loss = cross_entropy(logits / log_temperature.exp(), labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    return log_temperature.exp().item()
