"""What a method is; MAP, ensembles and temperatures, which have no posterior."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import nll_loss
from torch.utils.data import DataLoader

from benchmarks.models import AdaptedModel

DROPOUT_PASSES = 10
CHECKPOINTS_IN_ENSEMBLE = 3
ENSEMBLE_SIZE = 3

Loaders = dict[str, DataLoader]  # data sets by their names
Probabilities = dict[str, Tensor]  # (texts, classes) by the data set's name
LogitsOf = Callable[[Any], Tensor]  # from a batch to logits (texts, classes)
AnyMethod = TypeVar("AnyMethod", bound="Method")


@dataclass(frozen=True)
class Method:
    """A method: its key in options and figures, and its title in tables."""

    key: str
    title: str

    def asked(self, names: Collection[str] | None) -> bool:
        """Tell whether names, of keys or titles, ask for it; None asks for all."""
        return names is None or self.key in names or self.title in names


@dataclass(frozen=True)
class Members:
    """Models whose predictions are averaged, one model at a time."""

    logits: Callable[[], Iterator[LogitsOf]]

    @classmethod
    def of(cls, models: Sequence[AdaptedModel]) -> "Members":
        """Average models that are all in memory."""

        def logits() -> Iterator[LogitsOf]:
            for model in models:
                yield model.logits_model

        return cls(logits)

    @torch.no_grad()
    def predict(self, loaders: Mapping[str, Iterable[Any]]) -> Probabilities:
        """Compute the mean of the members' probabilities."""
        draws = defaultdict(list)
        for logits_of in self.logits():
            # One member at a time: the next may be the same model with other weights.
            for name, loader in loaders.items():
                logits = torch.cat([logits_of(batch).cpu() for batch in loader])
                draws[name].append(logits.softmax(-1))
        means = {}
        for name, of_set in draws.items():
            means[name] = torch.stack(of_set).mean(0)
        return means


@dataclass(frozen=True)
class PointMethod(Method):
    """A method without a posterior: `fit` takes the model and training batches."""

    fit: Callable[[AdaptedModel, DataLoader], Members]


@dataclass(frozen=True)
class Posterior(Method):
    """A method that fits training batches, and predicts as the host does."""

    # Has `fit(batches)`, `la(batch, link_approx=...)`.
    build: Callable[[AdaptedModel], Any]
    on_training: bool = False  # whether training data choose its prior precision too
    calibrated: bool = True  # whether experiments on calibration measure it
    costs: bool = False  # whether `cost` measures it
    shown: Collection[tuple[str, str]] = ()  # priors and links that overviews show


def find_methods(
    methods: Sequence[AnyMethod], names: Collection[str] | None
) -> list[AnyMethod]:
    """Find methods by key or title, in the order of the list; all by default."""
    known = {name for method in methods for name in (method.key, method.title)}
    unknown = set(names or ()) - known
    if unknown:
        listed = ", ".join(f"{each.key} ({each.title})" for each in methods)
        raise SystemExit(f"No method is called {unknown.pop()!r}; known are: {listed}.")
    return [method for method in methods if method.asked(names)]


def as_it_is(model: AdaptedModel, _: DataLoader) -> Members:
    """Predict with the model itself."""
    return Members.of([model])


def with_dropout(model: AdaptedModel, _: DataLoader) -> Members:
    """Predict with several passes that have the dropout of training."""

    def passes() -> Iterator[LogitsOf]:
        model.model.train()
        for _ in range(DROPOUT_PASSES):
            yield model.logits_model
        # Whoever has read all members finds the model as it was.
        model.model.eval()

    return Members(passes)


def last_checkpoints(model: AdaptedModel, _: DataLoader) -> Members:
    """Predict with the last checkpoints of one training; the model ends at the last."""
    all_steps = list(model.checkpoints)
    steps = all_steps[-CHECKPOINTS_IN_ENSEMBLE:]

    def checkpoints() -> Iterator[LogitsOf]:
        for step in steps:
            yield model.at(step).logits_model

    return Members(checkpoints)


def other_seeds(model: AdaptedModel, _: DataLoader) -> Members:
    """Predict with trainings of other seeds too, up to the same step as this one."""
    return Members.of(ensemble(model))


def ensemble(model: AdaptedModel) -> list[AdaptedModel]:
    """Train other seeds up to the same step as a model, which is the first of them."""
    assert model.another is not None
    # A model may have been taken back to an earlier checkpoint, for a curve of them.
    step = max(model.checkpoints)
    members = [model]
    for number in range(1, ENSEMBLE_SIZE):
        other = model.another(number)
        members.append(other.at(step))
    return members


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Find the number to divide logits by for the lowest NLL.

    Of `(members, texts, classes)`, that of the members' mean probabilities.
    """
    if logits.dim() == 2:
        logits = logits[None]
    # Of its logarithm any value is a temperature, and 0 leaves the logits as they are.
    log_temperature = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [log_temperature], max_iter=100, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        optimizer.zero_grad()
        tempered = logits / log_temperature.exp()
        # The logarithm of a mean of probabilities, in which no small one is lost.
        log_p = tempered.log_softmax(-1)
        log_mean = log_p.logsumexp(0) - math.log(len(log_p))
        loss = nll_loss(log_mean, labels)
        loss.backward()
        return loss.item()

    optimizer.step(closure)
    return log_temperature.exp().item()
