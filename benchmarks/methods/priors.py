"""What chooses a posterior's prior precision, and what it then predicts with every link.

Without a validation set, the training set chooses: its evidence, or the loss of leaving one of its
texts out. With one, its negative log-likelihood does.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from benchmarks.methods.links import (
    LINKS,
    MC,
    MEAN_FIELD,
    PROBIT,
    Beliefs,
    Link,
    probabilities,
)
from benchmarks.methods.method import Loaders, Probabilities, labels_of
from benchmarks.metrics import negative_log_likelihood
from laplace_lora_ext import Moments, PredictiveStatistics

# In the words of a table, and as keywords of `optimize_prior_precision`.
EVIDENCES: dict[str, dict[str, Any]] = {
    "evidence, scalar": {"method": "marglik"},
    "evidence, layerwise": {"method": "marglik", "prior_structure": "layerwise"},
}
LINEARIZED: dict[str, dict[str, Any]] = {
    "leave-one-out, scalar": {"method": "linearized_loo"},
    "leave-one-out, layerwise": {"method": "linearized_loo", "prior_structure": "layerwise"},
    "linearized evidence, scalar": {"method": "linearized_marglik"},
    "linearized evidence, layerwise": {
        "method": "linearized_marglik",
        "prior_structure": "layerwise",
    },
}
GRID_SEARCH, DESCENT = "validation, scalar", "validation, layerwise"
SCALED = "validation, factor of linearized evidence"
GRID = torch.logspace(-2, 4, 49)
COARSE_GRID = GRID[::4]
FACTORS = torch.logspace(-2, 2, 33)


@dataclass(frozen=True)
class Prediction:
    """Class probabilities, and what they come from.

    `chosen_by` is what the prior precision or temperature was chosen by, `chosen` the temperature
    or the prior precisions' geometric mean, `is_choice` whether validation data prefer this link
    to the method's other ones.
    """

    probabilities: Probabilities
    chosen_by: str = ""
    link: str = ""
    chosen: float | None = None
    is_choice: bool = False


class _Choice(NamedTuple):
    """A prior precision that validation data have chosen for a link, and their loss."""

    chosen_by: str
    link: Link
    prior_precision: torch.Tensor
    loss: float


def by_training(
    la: Any, train: DataLoader | None, loaders: Loaders, samples: int
) -> Iterator[Prediction]:
    """Choose prior precisions of a fitted approximation by the training set.

    By the evidence; and, where training batches are given, in the linearised model too.
    """
    chosen = {}
    for chosen_by, search in EVIDENCES.items():
        la.optimize_prior_precision(**search)
        chosen[chosen_by] = la.prior_precision.clone()
    if train is not None:
        model = la.linearize(train)
        for chosen_by, search in LINEARIZED.items():
            la.optimize_prior_precision(train_loader=model, **search)
            chosen[chosen_by] = la.prior_precision.clone()
    moments = _moments(la, loaders, list(chosen.values()))
    for place, (chosen_by, prior_precision) in enumerate(chosen.items()):
        for link in LINKS.values():
            yield Prediction(
                _probabilities(la, moments, place, link, samples),
                chosen_by,
                link.name,
                geometric_mean(prior_precision),
            )


def by_validation(
    la: Any,
    validation: DataLoader,
    train: DataLoader | None,
    loaders: Loaders,
    samples: int,
) -> list[Prediction]:
    """Choose prior precisions for each link, and mark the preferred link of each structure.

    A scalar on a grid; where training batches are given, a factor of the linearised model's
    evidence; and where statistics make that cheap, the paper's descent.
    """
    beliefs = Beliefs(la, validation)
    labels = labels_of(validation)
    grid = COARSE_GRID if beliefs.statistics is None else GRID
    choices = _search_grid(la, beliefs, labels, GRID_SEARCH, list(grid), samples)
    if train is not None:
        la.optimize_prior_precision(
            train_loader=train, **LINEARIZED["linearized evidence, layerwise"]
        )
        scaled = [factor * la.prior_precision for factor in FACTORS]
        choices += _search_grid(la, beliefs, labels, SCALED, scaled, samples)
    if beliefs.statistics is not None:
        choices += _descend(la, beliefs.statistics)
    least: dict[str, float] = {}
    for choice in choices:
        least[choice.chosen_by] = min(choice.loss, least.get(choice.chosen_by, math.inf))
    moments = _moments(la, loaders, [choice.prior_precision for choice in choices])
    return [
        Prediction(
            _probabilities(la, moments, place, choice.link, samples),
            choice.chosen_by,
            choice.link.name,
            geometric_mean(choice.prior_precision),
            is_choice=choice.loss == least[choice.chosen_by],
        )
        for place, choice in enumerate(choices)
    ]


def _search_grid(
    la: Any,
    beliefs: Beliefs,
    labels: torch.Tensor,
    chosen_by: str,
    grid: list[torch.Tensor],
    samples: int,
) -> list[_Choice]:
    """Try the prior precisions of a grid with every link."""
    on_grid = beliefs.moments(grid)
    choices = []
    for link in LINKS.values():
        losses = torch.tensor(
            [
                negative_log_likelihood(probabilities(la, moments, link, samples), labels)
                for moments in on_grid
            ]
        )
        best = grid[int(losses.argmin())]
        choices.append(_Choice(chosen_by, link, best, losses.min().item()))
    return choices


def _descend(la: Any, statistics: PredictiveStatistics) -> list[_Choice]:
    """Follow the gradient (the paper's algorithm 3) with the links that it is known for."""
    choices = []
    for link in (MC, PROBIT, MEAN_FIELD):
        history = la.optimize_prior_precision(
            method="val_gd",
            val_loader=statistics,
            prior_structure="layerwise",
            link_approx=link.link_approx,
        )
        best = la.prior_precision.clone()
        choices.append(_Choice(DESCENT, link, best, history.objective.min().item()))
    return choices


def _moments(
    la: Any, loaders: Loaders, prior_precisions: list[torch.Tensor]
) -> dict[str, list[Moments]]:
    return {name: Beliefs(la, loader).moments(prior_precisions) for name, loader in loaders.items()}


def _probabilities(
    la: Any, moments: dict[str, list[Moments]], place: int, link: Link, samples: int
) -> Probabilities:
    """Of each data set, under one of the prior precisions."""
    return {
        name: probabilities(la, of_set[place], link, samples) for name, of_set in moments.items()
    }


def geometric_mean(values: torch.Tensor) -> float:
    return values.log().mean().exp().item()
