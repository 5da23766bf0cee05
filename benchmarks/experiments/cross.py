"""Curvatures crossed with ways to choose the prior, around one frozen checkpoint.

It tells whether the curvature or the prior makes a Laplace approximation look good or
bad.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.experiments.calibration import Costs, Tests, figures_of, text_of
from benchmarks.fine_tuning import TEST, Pretrained, fine_tune, held_out, prepare
from benchmarks.methods import METHODS
from benchmarks.methods.method import Loaders, Posterior, fit_temperature, labels_of
from benchmarks.methods.priors import (
    BY_TRAINING,
    NO_PRIOR,
    Prediction,
    Predicts,
    Prior,
    geometric_mean,
    predictor_of,
)
from benchmarks.options import Cross
from benchmarks.report import Result, Row, say
from laplace_lora_ext.metrics import negative_log_likelihood

HELD_OUT = 0.2
HELD = "held-out texts"
LINK = "mean_field"
CURVATURES = ("kron", "lowrank_kron_paper", "lowrank_kron")
EVIDENCES = ("marglik_scalar", "marglik_layerwise")
BY_HELD_OUT = Prior("held_out", "held-out fifth")
BY_TEST = Prior("test", "the test texts themselves")
TEMPERATURE = Prior("held_out_temperature", "temperature of the held-out fifth")
FIGURES = ("accuracy", "nll", "ece", "chosen")


def run(options: Cross) -> Iterator[Result]:
    """Measure each seed, and report after each curvature."""
    rows: list[Row] = []
    for seed in options.seeds:
        pretrained = prepare(options, seed)
        trial = Trial(pretrained, options, seed)
        rows += trial.without_posterior()
        for key in CURVATURES:
            rows += trial.with_curvature(METHODS[key])
            yield figures_of(pretrained, rows), text_of(pretrained, rows, FIGURES)


@dataclass(frozen=True)
class Chosen:
    """A prior precision, and who chose it."""

    prior: Prior
    prior_precision: torch.Tensor


class Trial:
    """One seed: a model that is trained on four fifths of the texts, and stays as it
    is.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        options: Cross,
        seed: int,
    ) -> None:
        self.pretrained = pretrained
        self.options = options
        self.seed = seed
        self.rest, held = held_out(pretrained, HELD_OUT)
        self.held_labels = labels_of(held)
        self.tests = Tests(pretrained, seed)
        self.loaders: Loaders = {HELD: pretrained.loader(held), **self.tests.loaders}
        self.model = fine_tune(pretrained, self.rest, seed)

    def without_posterior(self) -> Iterator[Row]:
        """Measure the model itself, and with a temperature of the held-out texts."""
        logits = {
            name: self.model.logits(loader) for name, loader in self.loaders.items()
        }
        temperature = fit_temperature(logits[HELD], self.held_labels)
        for prior, divisor in ((NO_PRIOR, 1.0), (TEMPERATURE, temperature)):
            probabilities = {
                name: (each / divisor).softmax(-1) for name, each in logits.items()
            }
            yield self._row(
                METHODS["map"], Prediction(probabilities, prior, chosen=divisor)
            )

    def with_curvature(self, method: Any) -> Iterator[Row]:
        """Measure a curvature with each prior."""
        assert isinstance(method, Posterior)
        say(self.options, f"Seed {self.seed}: {method.title}")
        la = method.build(self.model)
        la.fit(self.pretrained.loader(self.rest), progress_bar=not self.options.quiet)
        predicts = predictor_of(la, self.loaders)
        for chosen in (*self._by_evidence(la), *self._by_labels(predicts)):
            prediction = Prediction(
                probabilities=predicts.probabilities(chosen.prior_precision, LINK),
                prior=chosen.prior,
                link=LINK,
                chosen=geometric_mean(chosen.prior_precision),
            )
            yield self._row(method, prediction)

    def _by_evidence(self, la: Any) -> Iterator[Chosen]:
        for key in EVIDENCES:
            prior = BY_TRAINING[key]
            yield Chosen(prior, prior.choose(la, None))

    def _by_labels(self, predicts: Predicts) -> list[Chosen]:
        """Choose what predicts the held-out texts best, and what predicts the test
        texts best.
        """
        labels = {HELD: self.held_labels, TEST: self.tests.labels[TEST]}
        losses: dict[str, list[float]] = {name: [] for name in labels}
        grid = torch.logspace(-2, 4, self.options.grid_size)[:, None]
        for prior_precision in grid:
            probabilities = predicts.probabilities(prior_precision, LINK)
            for name, of_name in labels.items():
                losses[name].append(
                    negative_log_likelihood(probabilities[name], of_name)
                )
        choices = []
        for prior, name in ((BY_HELD_OUT, HELD), (BY_TEST, TEST)):
            best = torch.tensor(losses[name]).argmin()
            choices.append(Chosen(prior, grid[best]))
        return choices

    def _row(self, method: Any, prediction: Prediction) -> Row:
        measured = {
            name: each
            for name, each in prediction.probabilities.items()
            if name != HELD
        }
        of_tests = Prediction(
            measured, prediction.prior, prediction.link, prediction.chosen
        )
        return self.tests.row(
            method, of_tests, Costs(predict_seconds=0.0, forward_passes=0.0)
        )
