"""Every method on one fine-tuned model: predictions under the paper's two protocols.

Without a validation set, the evidence of the training set chooses prior precisions. With one, split
off the training set, its negative log-likelihood chooses them, and a temperature.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.calibration.fine_tuned import FineTuned, Pretrained, Records
from benchmarks.calibration.posteriors import (
    COARSE_GRID,
    EVIDENCES,
    GRID,
    LINKS,
    PREDICTION_BATCH_SIZE,
    STRUCTURES,
    Beliefs,
    Posterior,
    probabilities,
)
from benchmarks.metrics import negative_log_likelihood
from benchmarks.temperature import fit_temperature

MAP = "MAP"
MC_DROPOUT = "MC dropout"
CHECKPOINT_ENSEMBLE = "Checkpoint ensemble"
DEEP_ENSEMBLE = "Deep ensemble"
TEMPERATURE_SCALING = "Temperature scaling"
WITHOUT_POSTERIOR = (MAP, MC_DROPOUT, CHECKPOINT_ENSEMBLE, DEEP_ENSEMBLE, TEMPERATURE_SCALING)
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
        """Choose prior precisions by the evidence of the training set."""
        la = posterior.fit(self.pretrained, self.fine_tuned, self.train)
        chosen = {}
        for evidence in posterior.evidences:
            data = {}
            if evidence == "linearized_marglik":
                loader = self.pretrained.loader(self.train, PREDICTION_BATCH_SIZE)
                data = {"train_loader": la.linearize(loader)}
            for structure in STRUCTURES:
                la.optimize_prior_precision(method=evidence, prior_structure=structure, **data)
                chosen[f"{EVIDENCES[evidence]}, {structure}"] = la.prior_precision.clone()
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
        """Choose a scalar prior precision for each link, and mark the preferred link."""
        la = posterior.fit(self.pretrained, self.fine_tuned, self.train)
        beliefs = Beliefs(la, self.pretrained.loader(validation, PREDICTION_BATCH_SIZE))
        grid = COARSE_GRID if beliefs.statistics is None else GRID
        on_grid = beliefs.moments(list(grid))
        labels = _labels(validation)
        scores = torch.tensor(
            [
                [
                    negative_log_likelihood(probabilities(la, moments, link, self.samples), labels)
                    for moments in on_grid
                ]
                for link in LINKS
            ]
        )
        best = scores.min(dim=1)
        chosen = list(grid[best.indices])
        moments = {
            name: Beliefs(la, loader).moments(chosen) for name, loader in self.loaders.items()
        }
        return [
            Prediction(
                posterior.name,
                {
                    name: probabilities(la, of_set[place], link, self.samples)
                    for name, of_set in moments.items()
                },
                "validation, scalar",
                link.name,
                chosen[place].item(),
                is_choice=place == int(best.values.argmin()),
            )
            for place, link in enumerate(LINKS)
        ]


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
