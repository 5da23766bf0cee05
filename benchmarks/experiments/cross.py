"""Curvatures crossed with ways to choose the prior, around one frozen checkpoint.

It tells whether the curvature or the prior makes a Laplace approximation look good or
bad.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.experiments.calibration import Tests, figures_of, text_of
from benchmarks.fine_tuning import (
    HELD,
    TEST,
    Pretrained,
    fine_tune,
    held_out,
    labels_of,
    prepare,
)
from benchmarks.methods import CURVATURES, HEAD_ALONE, METHODS
from benchmarks.methods.method import Loaders, Method, Posterior, fit_temperature
from benchmarks.methods.posteriors import LINK
from benchmarks.methods.priors import (
    BY_TRAINING,
    NO_PRIOR,
    Prediction,
    Prior,
    data_of,
    geometric_mean,
    predicted,
)
from benchmarks.options import Cross
from benchmarks.report import Result, Row, say
from laplace_lora_ext import LoRALaplace
from laplace_lora_ext.metrics import negative_log_likelihood

EVIDENCES = ("marglik_scalar", "marglik_layerwise")
BY_HELD_OUT = Prior("held_out", "held-out fifth")
# What no honest way could beat: it shows what choosing has cost.
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
        # A prompt's answers have no head.
        heads = [HEAD_ALONE] if pretrained.has_head else []
        for method in (*CURVATURES, *heads):
            rows += trial.with_curvature(method)
            yield figures_of(pretrained, rows), text_of(pretrained, rows, FIGURES)


class Trial:
    """One seed: a model that is trained on four fifths of the texts."""

    def __init__(self, pretrained: Pretrained, options: Cross, seed: int) -> None:
        self.pretrained = pretrained
        self.options = options
        self.seed = seed
        self.rest, held = held_out(pretrained)
        self.held_labels = labels_of(held)
        self.tests = Tests(pretrained, seed)
        of_held = pretrained.loader(held)
        self.loaders: Loaders = {HELD: of_held, **self.tests.loaders}
        self.model = fine_tune(pretrained, self.rest, seed)

    def without_posterior(self) -> Iterator[Row]:
        """Measure the model itself, and with a temperature of the held-out texts."""
        logits = {
            name: self.model.logits(loader) for name, loader in self.loaders.items()
        }
        fitted = fit_temperature(logits[HELD], self.held_labels)
        # The model itself is the one at a temperature of 1.
        for prior, temperature in ((NO_PRIOR, 1.0), (TEMPERATURE, fitted)):
            probabilities = {}
            for name, of_set in logits.items():
                tempered = of_set / temperature
                probabilities[name] = tempered.softmax(-1)
            prediction = Prediction(probabilities, prior, chosen=temperature)
            yield self._row(METHODS["map"], prediction)

    def with_curvature(self, method: Posterior) -> Iterator[Row]:
        """Measure a curvature with each prior."""
        say(self.options, f"Seed {self.seed}: {method.title}")
        la = method.build(self.model)
        batches = self.pretrained.loader(self.rest)
        la.fit(batches, progress_bar=not self.options.quiet)
        by_evidence = [BY_TRAINING[key] for key in EVIDENCES]
        n_evidences = len(by_evidence)
        of_evidence = [prior.choose(la, None) for prior in by_evidence]
        # From next to no prior to one that leaves next to nothing of the variance.
        grid = torch.logspace(-2, 4, self.options.grid_size)
        predictions = self._predictions(la, [*of_evidence, *grid[:, None]])
        of_grid = predictions[n_evidences:]
        chosen: dict[Prior, Prediction] = {}
        for prior, prediction in zip(
            by_evidence, predictions[:n_evidences], strict=True
        ):
            chosen[prior] = prediction
        chosen[BY_HELD_OUT] = _best(of_grid, HELD, self.held_labels)
        chosen[BY_TEST] = _best(of_grid, TEST, self.tests.labels[TEST])
        for prior, prediction in chosen.items():
            yield self._row(method, replace(prediction, prior=prior))

    def _predictions(
        self, la: LoRALaplace, prior_precisions: Sequence[Tensor]
    ) -> list[Prediction]:
        """Predict the held-out and the test texts with each prior precision."""
        # All priors at once: a stock curvature takes passes for its predictions.
        by_set = {
            name: predicted(la, data, prior_precisions, [LINK])
            for name, data in data_of(la, self.loaders, [LINK]).items()
        }
        predictions = []
        for number, tried in enumerate(prior_precisions):
            probabilities = {name: of_set[number] for name, of_set in by_set.items()}
            chosen = geometric_mean(tried)
            predictions.append(Prediction(probabilities, link=LINK, chosen=chosen))
        return predictions

    def _row(self, method: Method, prediction: Prediction) -> Row:
        """Measure a prediction of the test texts; what it costs is no question here."""
        measured = dict(prediction.probabilities)
        del measured[HELD]
        of_tests = replace(prediction, probabilities=measured)
        return self.tests.row(method, of_tests)


def _best(predictions: Sequence[Prediction], name: str, labels: Tensor) -> Prediction:
    """Find the prediction with the least NLL of a data set."""

    def loss(prediction: Prediction) -> float:
        return negative_log_likelihood(prediction.probabilities[name], labels)

    return min(predictions, key=loss)
