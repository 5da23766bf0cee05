"""What a method is: its name, how it is fitted to a fine-tuned model, and how it predicts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.models import AdaptedModel

Loaders = dict[str, DataLoader]  # data sets by their names
Probabilities = dict[str, torch.Tensor]  # (texts, classes) by the data set's name
LogitsOf = Callable[[Any], torch.Tensor]  # from a batch to logits (texts, classes)


@dataclass(frozen=True)
class Method:
    """A line of the list: what options and figures call it, and what tables do."""

    key: str
    title: str


@dataclass(frozen=True)
class Members:
    """Models whose predictions are averaged, one after another, and a temperature if there is."""

    logits: Callable[[], Iterator[LogitsOf]]
    temperature: float | None = None

    @torch.no_grad()
    def predict(self, loaders: Loaders) -> Probabilities:
        """Mean of the members' probabilities."""
        draws: dict[str, list[torch.Tensor]] = {name: [] for name in loaders}
        for logits_of in self.logits():
            for name, loader in loaders.items():
                logits = torch.cat([logits_of(batch).cpu() for batch in loader])
                draws[name].append(logits.softmax(-1))
        return {name: torch.stack(of_set).mean(0) for name, of_set in draws.items()}


@dataclass(frozen=True)
class PointMethod(Method):
    """A method without a posterior: `fit` takes the model and, if need be, validation batches."""

    fit: Callable[[AdaptedModel, DataLoader], Members]
    needs_validation: bool = False


@dataclass(frozen=True)
class Posterior(Method):
    """A method that is fitted on training batches, and predicts as the host's classes do.

    `build` makes what has `fit(batches)` and `la(batch, link_approx=...)`.
    """

    build: Callable[[AdaptedModel], Any]
    linearized: bool = False  # whether its prior precision is chosen in the linearised model too


def labels_of(loader: DataLoader) -> torch.Tensor:
    """Classes (texts,) of a loader's records; a pass over its batches would draw random numbers."""
    records: Any = loader.dataset
    return torch.tensor([record["labels"] for record in records])
