"""Every method on one fine-tuned model: predictions under the paper's two protocols.

Without a validation set, the training set chooses prior precisions: its evidence, or the loss of
leaving one of its texts out. With one, split off the training set, its negative log-likelihood
chooses them, and a temperature.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from benchmarks.calibration.fine_tuned import FineTuned, Pretrained, Records
from benchmarks.calibration.posteriors import (
    COARSE_GRID,
    EVIDENCES,
    FACTORS,
    GRID,
    LINEARIZED,
    LINKS,
    MC,
    MEAN_FIELD,
    PREDICTION_BATCH_SIZE,
    PROBIT,
    Beliefs,
    Link,
    Posterior,
    probabilities,
)
from benchmarks.metrics import negative_log_likelihood
from benchmarks.temperature import fit_temperature
from laplace_lora_ext import PredictiveStatistics

MAP = "MAP"
MC_DROPOUT = "MC dropout"
CHECKPOINT_ENSEMBLE = "Checkpoint ensemble"
DEEP_ENSEMBLE = "Deep ensemble"
TEMPERATURE_SCALING = "Temperature scaling"
WITHOUT_POSTERIOR = (MAP, MC_DROPOUT, CHECKPOINT_ENSEMBLE, DEEP_ENSEMBLE, TEMPERATURE_SCALING)
GRID_SEARCH, DESCENT = "validation, scalar", "validation, layerwise"
SCALED = "validation, factor of linearized evidence"
DROPOUT_PASSES = 10
CHECKPOINTS_IN_ENSEMBLE = 3

DataSets = dict[str, Records]
Predictions = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Prediction:
    """What one method predicts.

    Attributes
    ----------
    method : str
        Its name.
    chosen_by : str
        What its prior precision or temperature was chosen by, if it has one.
    link : str
        Its link approximation, if it has one.
    probabilities : dict
        Class probabilities (texts, classes) by the data set's name.
    chosen : float or None
        Temperature, or geometric mean of the prior precisions.
    is_choice : bool
        Whether validation data prefer it to the method's other links and structures.
    """

    method: str
    probabilities: Predictions
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


class Evaluation:
    """A fine-tuned model, and the data sets that methods are measured on.

    Parameters
    ----------
    pretrained : Pretrained
        Knows how to make batches.
    fine_tuned : FineTuned
        The model.
    train : list of dict
        What it was trained on.
    data_sets : dict
        Records by the data set's name.
    samples : int
        Samples of the logits with Monte-Carlo links.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        fine_tuned: FineTuned,
        train: Records,
        data_sets: DataSets,
        samples: int,
    ) -> None:
        self.pretrained = pretrained
        self.fine_tuned = fine_tuned
        self.train = train
        self.samples = samples
        self.loaders = {
            name: pretrained.loader(records, PREDICTION_BATCH_SIZE)
            for name, records in data_sets.items()
        }

    def logits(self) -> Predictions:
        """Logits of the model in its current state."""
        return {name: self.fine_tuned.logits(loader) for name, loader in self.loaders.items()}

    def map(self) -> Prediction:
        """Take the model as it is."""
        return Prediction(MAP, _softmax(self.logits()))

    def monte_carlo_dropout(self) -> Prediction:
        """Average over passes with the dropout of the training."""
        self.fine_tuned.model.train()
        draws = [_softmax(self.logits()) for _ in range(DROPOUT_PASSES)]
        self.fine_tuned.model.eval()
        return Prediction(MC_DROPOUT, _mean(draws))

    def checkpoint_ensemble(self, steps: Sequence[int]) -> Prediction:
        """Average over the last checkpoints of one training; the last one stays."""
        draws = []
        for step in steps[-CHECKPOINTS_IN_ENSEMBLE:]:
            self.fine_tuned.restore(step)
            draws.append(_softmax(self.logits()))
        return Prediction(CHECKPOINT_ENSEMBLE, _mean(draws))

    def by_evidence(self, posterior: Posterior) -> Iterator[Prediction]:
        """Choose prior precisions by the evidence of the training set, or by leaving one out."""
        la = posterior.fit(self.pretrained, self.fine_tuned, self.train)
        chosen = {}
        for chosen_by, search in EVIDENCES.items():
            la.optimize_prior_precision(**search)
            chosen[chosen_by] = la.prior_precision.clone()
        if posterior.linearized:
            model = la.linearize(self.pretrained.loader(self.train, PREDICTION_BATCH_SIZE))
            for chosen_by, search in LINEARIZED.items():
                la.optimize_prior_precision(train_loader=model, **search)
                chosen[chosen_by] = la.prior_precision.clone()
        moments = {
            name: Beliefs(la, loader).moments(list(chosen.values()))
            for name, loader in self.loaders.items()
        }
        for place, (chosen_by, prior_precision) in enumerate(chosen.items()):
            for link in LINKS:
                yield Prediction(
                    posterior.name,
                    {
                        name: probabilities(la, of_set[place], link, self.samples)
                        for name, of_set in moments.items()
                    },
                    chosen_by,
                    link.name,
                    _geometric_mean(prior_precision),
                )

    def temperature_scaling(self, validation: Records) -> Prediction:
        """Divide the logits by the temperature that validation data prefer."""
        loader = self.pretrained.loader(validation, PREDICTION_BATCH_SIZE)
        temperature = fit_temperature(self.fine_tuned.logits(loader), _labels(validation))
        scaled = {name: logits / temperature for name, logits in self.logits().items()}
        return Prediction(
            TEMPERATURE_SCALING,
            _softmax(scaled),
            "validation",
            chosen=temperature,
        )

    def by_validation(self, posterior: Posterior, validation: Records) -> list[Prediction]:
        """Choose prior precisions for each link, and mark the preferred link of each structure."""
        la = posterior.fit(self.pretrained, self.fine_tuned, self.train)
        beliefs = Beliefs(la, self.pretrained.loader(validation, PREDICTION_BATCH_SIZE))
        labels = _labels(validation)
        grid = COARSE_GRID if beliefs.statistics is None else GRID
        choices = self._search_grid(la, beliefs, labels, GRID_SEARCH, list(grid))
        if posterior.linearized:
            la.optimize_prior_precision(
                method="linearized_marglik",
                prior_structure="layerwise",
                train_loader=self.pretrained.loader(self.train, PREDICTION_BATCH_SIZE),
            )
            grid = [factor * la.prior_precision for factor in FACTORS]
            choices += self._search_grid(la, beliefs, labels, SCALED, grid)
        if beliefs.statistics is not None:
            choices += _descend(la, beliefs.statistics)
        least: dict[str, float] = {}
        for choice in choices:
            least[choice.chosen_by] = min(choice.loss, least.get(choice.chosen_by, math.inf))
        moments = {
            name: Beliefs(la, loader).moments([choice.prior_precision for choice in choices])
            for name, loader in self.loaders.items()
        }
        return [
            Prediction(
                posterior.name,
                {
                    name: probabilities(la, of_set[place], choice.link, self.samples)
                    for name, of_set in moments.items()
                },
                choice.chosen_by,
                choice.link.name,
                _geometric_mean(choice.prior_precision),
                is_choice=choice.loss == least[choice.chosen_by],
            )
            for place, choice in enumerate(choices)
        ]

    def _search_grid(
        self,
        la: Any,
        beliefs: Beliefs,
        labels: torch.Tensor,
        chosen_by: str,
        grid: list[torch.Tensor],
    ) -> list[_Choice]:
        """Try the prior precisions of a grid with every link."""
        on_grid = beliefs.moments(grid)
        choices = []
        for link in LINKS:
            losses = torch.tensor(
                [
                    negative_log_likelihood(probabilities(la, moments, link, self.samples), labels)
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


def deep_ensemble(members: Sequence[Evaluation]) -> Prediction:
    """Average over trainings that differ in their seeds."""
    return Prediction(DEEP_ENSEMBLE, _mean([_softmax(member.logits()) for member in members]))


def _labels(records: Records) -> torch.Tensor:
    return torch.tensor([record["labels"] for record in records])


def _softmax(logits: Predictions) -> Predictions:
    return {name: values.softmax(-1) for name, values in logits.items()}


def _mean(draws: Sequence[Predictions]) -> Predictions:
    return {name: torch.stack([draw[name] for draw in draws]).mean(0) for name in draws[0]}


def _geometric_mean(values: torch.Tensor) -> float:
    return values.log().mean().exp().item()
