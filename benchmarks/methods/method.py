"""What a method is; and the methods without a posterior: MAP and ensembles; temperatures."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import nll_loss
from torch.utils.data import DataLoader

from benchmarks.models import AdaptedModel

DROPOUT_PASSES = 10
CHECKPOINTS_IN_ENSEMBLE = 3
ENSEMBLE_SIZE = 3
NO_CLASS = -1  # label of a text for which no class is right

Loaders = dict[str, DataLoader]  # data sets by their names
Probabilities = dict[str, torch.Tensor]  # (texts, classes) by the data set's name
LogitsOf = Callable[[Any], torch.Tensor]  # from a batch to logits (texts, classes)


@dataclass(frozen=True)
class Method:
    """A method: its key in options and figures, and its title in tables."""

    key: str
    title: str


@dataclass(frozen=True)
class Members:
    """Models whose predictions are averaged, one model at a time."""

    logits: Callable[[], Iterator[LogitsOf]]

    @torch.no_grad()
    def predict(self, loaders: Mapping[str, Iterable[Any]]) -> Probabilities:
        """Mean of the members' probabilities."""
        draws: dict[str, list[torch.Tensor]] = {name: [] for name in loaders}
        for logits_of in self.logits():
            for name, loader in loaders.items():
                logits = torch.cat([logits_of(batch).cpu() for batch in loader])
                draws[name].append(logits.softmax(-1))
        return {name: torch.stack(of_set).mean(0) for name, of_set in draws.items()}


@dataclass(frozen=True)
class PointMethod(Method):
    """A method without a posterior: `fit` takes the model and training batches."""

    fit: Callable[[AdaptedModel, DataLoader], Members]


@dataclass(frozen=True)
class Posterior(Method):
    """A method that is fitted on training batches, and predicts as the host's classes do."""

    build: Callable[[AdaptedModel], Any]  # has `fit(batches)`, `la(batch, link_approx=...)`
    on_training: bool = False  # whether training data choose its prior precision too


def labels_of(loader: DataLoader) -> torch.Tensor:
    """Labels `(texts,)` of a loader's records, without a pass, which would draw random numbers."""
    records: Any = loader.dataset
    return torch.tensor([record.get("labels", NO_CLASS) for record in records])


def as_it_is(model: AdaptedModel, *_: DataLoader) -> Members:
    return Members(lambda: iter([model.logits_model]))


def with_dropout(model: AdaptedModel, *_: DataLoader) -> Members:
    """Several passes with the dropout of training."""

    def passes() -> Iterator[LogitsOf]:
        model.model.train()
        yield from [model.logits_model] * DROPOUT_PASSES
        model.model.eval()

    return Members(passes)


def last_checkpoints(model: AdaptedModel, *_: DataLoader) -> Members:
    """The last checkpoints of one training; the model ends at the last."""
    steps = list(model.checkpoints)[-CHECKPOINTS_IN_ENSEMBLE:]
    return Members(lambda: (model.at(step).logits_model for step in steps))


def other_seeds(model: AdaptedModel, *_: DataLoader) -> Members:
    """Trainings with other seeds, up to the same step as this one."""
    assert model.another is not None
    step = max(model.checkpoints)
    others = [model.another(number).at(step) for number in range(1, ENSEMBLE_SIZE)]
    return Members(lambda: iter([member.logits_model for member in (model, *others)]))


def fit_temperature(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """The number to divide logits by for the lowest NLL.

    Of `(members, texts, classes)`, that of the members' mean probabilities.
    """
    logits = logits.reshape(-1, *logits.shape[-2:])
    log_temperature = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.LBFGS([log_temperature], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Any:
        optimizer.zero_grad()
        members = (logits / log_temperature.exp()).log_softmax(-1)
        loss = nll_loss(members.logsumexp(0) - math.log(len(members)), labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    return log_temperature.exp().item()
