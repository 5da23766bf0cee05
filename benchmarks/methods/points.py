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


def as_it_is(model: AdaptedModel, validation: DataLoader | None) -> Members:
    """The model after training."""
    return Members(lambda: iter([model.logits_model]))


def with_dropout(model: AdaptedModel, validation: DataLoader | None) -> Members:
    """Passes with the dropout of the training."""

    def passes() -> Iterator[LogitsOf]:
        model.model.train()
        for _ in range(DROPOUT_PASSES):
            yield model.logits_model
        model.model.eval()

    return Members(passes)


def last_checkpoints(model: AdaptedModel, validation: DataLoader | None) -> Members:
    """The last checkpoints of one training; the last one stays."""

    def checkpoints() -> Iterator[LogitsOf]:
        for step in list(model.checkpoints)[-CHECKPOINTS_IN_ENSEMBLE:]:
            model.restore(step)
            yield model.logits_model

    return Members(checkpoints)


def other_seeds(model: AdaptedModel, validation: DataLoader | None) -> Members:
    """Trainings that differ in their seeds, as far as this one has come."""
    assert model.another is not None
    step = max(model.checkpoints)
    others = [model.another(number).at(step) for number in range(1, ENSEMBLE_SIZE)]
    return Members(lambda: iter([member.logits_model for member in (model, *others)]))


def scaled(model: AdaptedModel, validation: DataLoader | None) -> Members:
    """The model with its logits divided by the temperature that validation data prefer."""
    assert validation is not None
    temperature = fit_temperature(model.logits(validation), labels_of(validation))

    def logits_of(batch: Any) -> torch.Tensor:
        return model.logits_model(batch) / temperature

    return Members(lambda: iter([logits_of]), temperature)


def fit_temperature(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Find the one number by which logits are divided to minimise the NLL."""
    log_temperature = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.LBFGS([log_temperature], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(logits / log_temperature.exp(), labels)
        loss.backward()
        return loss

    optimizer.step(closure)  # pyright: ignore[reportArgumentType]
    return log_temperature.exp().item()
