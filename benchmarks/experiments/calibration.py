"""Methods that need no held-out texts on models fine-tuned with several seeds."""

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch.utils.benchmark import timer

from benchmarks import metrics, report
from benchmarks.fine_tuning import (
    NO_CLASS,
    TEST,
    TRAIN,
    Pretrained,
    fine_tune,
    labels_of,
    prepare,
)
from benchmarks.measuring import Clock, repeated_seconds
from benchmarks.methods import CALIBRATED, priors
from benchmarks.methods.method import Method, PointMethod, Posterior, find_methods
from benchmarks.methods.priors import Prediction
from benchmarks.options import Calibration
from benchmarks.report import Figures, Result, Row, say

FIGURES = (
    "accuracy",
    "nll",
    "ece",
    "regret",
    "chosen",
    "forward_passes",
    "fit_seconds",
    "predict_seconds",
)
TIMED_BATCHES = 4  # of predictions, which take stock classes seconds each
REPETITIONS = 3


def run(options: Calibration) -> Iterator[Result]:
    """Measure each seed, and report after each method, as runs may be cut off."""
    methods = find_methods(CALIBRATED, options.methods)
    rows: list[Row] = []
    for seed in options.seeds:
        pretrained = prepare(options, seed)
        for of_method in measured(pretrained, seed, methods):
            rows += of_method
            yield figures_of(pretrained, rows), text_of(pretrained, rows, FIGURES)


def measured(
    pretrained: Pretrained, seed: int, methods: Collection[Method]
) -> Iterator[list[Row]]:
    """Fine-tune, and measure MAP, then methods: a row for each prior and link."""
    comparison = Comparison(pretrained, seed)
    # MAP's predictions are the unit of costs.
    map_, *_ = CALIBRATED
    for method in (map_, *(method for method in methods if method != map_)):
        say(pretrained.options, f"Seed {seed}: {method.title}")
        if isinstance(method, PointMethod):
            yield [comparison.of_point(method)]
        elif isinstance(method, Posterior):
            yield list(comparison.of_posterior(method))


class Comparison:
    """One seed: a fine-tuned model, for which methods are measured in turn."""

    def __init__(self, pretrained: Pretrained, seed: int) -> None:
        self.pretrained = pretrained
        self.tests = Tests(pretrained, seed)
        records = pretrained.data[TRAIN]
        self.model = fine_tune(pretrained, records, seed)
        self.train = pretrained.prediction_loader(records)

    def of_point(self, method: PointMethod) -> Row:
        """Measure a method without a posterior."""
        started = timer()
        members = method.fit(self.model, self.train)
        fit_seconds = timer() - started
        started = timer()
        probabilities = members.predict({TEST: self.tests.loaders[TEST]})
        predict_seconds = timer() - started
        # They are no part of the time, which is that of the test texts.
        shifted = dict(self.tests.loaders)
        del shifted[TEST]
        probabilities |= members.predict(shifted)
        # MAP comes first.
        self.tests.bare_seconds = self.tests.bare_seconds or predict_seconds
        prediction = Prediction(probabilities)
        return self.tests.row(method, prediction, predict_seconds, fit_seconds)

    def of_posterior(self, method: Posterior) -> Iterator[Row]:
        """Measure a posterior with each prior and link."""
        started = timer()
        la = method.build(self.model)
        batches = self.pretrained.loader(self.pretrained.data[TRAIN])
        la.fit(batches, progress_bar=not self.pretrained.options.quiet)
        fit_seconds = timer() - started

        def predict(batch: Any) -> object:
            # Links differ by little: the passes are the same.
            return la(batch, link_approx="probit")

        predict_seconds = self.tests.seconds(predict)
        predictions = priors.predictions(
            la,
            self.train if method.on_training else None,
            self.tests.loaders,
            self.tests.labels[TEST],
        )
        for prediction in predictions:
            yield self.tests.row(method, prediction, predict_seconds, fit_seconds)


class Tests:
    """The texts that one seed is measured on: makes rows of predictions."""

    bare_seconds: float | None = None  # of the model's own prediction of all test texts

    def __init__(self, pretrained: Pretrained, seed: int) -> None:
        self.seed = seed
        self.loaders = {}
        self.labels = {}
        for name in (TEST, *pretrained.task.shifted):
            records = pretrained.data[name]
            self.loaders[name] = pretrained.prediction_loader(records)
            self.labels[name] = labels_of(records)

    def seconds(self, predict: Callable[[Any], object], clock: Clock = timer) -> float:
        """Time a prediction of all test texts, by some of their batches."""
        # The loader begins with the shortest texts.
        everything = list(self.loaders[TEST])
        step = math.ceil(len(everything) / TIMED_BATCHES)
        batches = everything[step // 2 :: step]

        def predict_some() -> None:
            for batch in batches:
                predict(batch)

        timing = repeated_seconds(predict_some, REPETITIONS, clock=clock)
        return timing.minimum * len(everything) / len(batches)

    def row(
        self,
        method: Method,
        prediction: Prediction,
        predict_seconds: float | None = None,
        fit_seconds: float | None = None,
        trainings: float | None = None,
        megabytes: float | None = None,
    ) -> Row:
        """Measure probabilities of the test texts and each shifted set.

        `predict_seconds` are those of all test texts, `trainings` are steps, relative
        to an ordinary training's, and `megabytes` what is kept beside the base model.
        """
        forward_passes = None
        if predict_seconds is not None and self.bare_seconds is not None:
            forward_passes = predict_seconds / self.bare_seconds
        test = prediction.probabilities[TEST]
        labels = self.labels[TEST]
        names = [name for name in self.labels if name != TEST]
        shifted = {name: self._shifted(name, prediction) for name in names}
        return {
            "seed": self.seed,
            "method": method.key,
            "name": method.title,
            "prior": prediction.prior.key,
            "chosen_by": prediction.prior.title,
            "link": prediction.link,
            "chosen": prediction.chosen,
            "regret": prediction.regret,
            "predict_seconds": predict_seconds,
            "forward_passes": forward_passes,
            "fit_seconds": fit_seconds,
            "trainings": trainings,
            "megabytes": megabytes,
            **metrics.quality_with_aurc(test, labels),
            **metrics.queue(test, labels),
            "shifted": shifted,
        }

    def _shifted(self, name: str, prediction: Prediction) -> Figures:
        """Measure predictions of a shifted set; quality only where a class is right."""
        labels = self.labels[name]
        figures = {}
        has_class = labels != NO_CLASS
        if bool(has_class.all()):
            figures |= metrics.quality_with_aurc(prediction.probabilities[name], labels)
        signs = {}
        # Shifted texts are to be told apart from the test texts.
        for of_set in (TEST, name):
            of_probabilities = metrics.signs_of(prediction.probabilities[of_set])
            others = prediction.signs.get(of_set, {})
            signs[of_set] = {**of_probabilities, **others}
        return figures | metrics.shift_detection(signs[TEST], signs[name])


def figures_of(pretrained: Pretrained, rows: list[Row]) -> Figures:
    """Join rows with what they were measured on."""
    return {**pretrained.figures, "methods": rows}


def text_of(
    pretrained: Pretrained, rows: list[Row], figures: Collection[str]
) -> list[str]:
    """Put rows of several seeds in words and a table."""
    task = pretrained.description
    columns = list(figures)
    # Copies: what is added for the table is no part of the figures.
    shown = [dict(row) for row in rows]
    for name in task["shifted"]:
        auroc = f"AUROC of {name}"
        nll = f"NLL of {name}"
        columns.append(auroc)
        # Foreign texts have no labels, and then no row has their loss.
        has_labels = "nll" in rows[0]["shifted"][name]
        if has_labels:
            columns.append(nll)
        for row in shown:
            of_set = row["shifted"][name]
            row[auroc] = of_set["shift_auroc"]
            row[nll] = of_set.get("nll")
    words = (
        f"Task {task['name']}: {pretrained.hyperparameters.model} with LoRA, "
        f"{task['train']} training texts, {task['test']} test texts, "
        f"{len(task['classes'])} classes; shifted texts: "
        f"{report.counts(task['shifted'])}. Seeds: {report.seeds_of(rows)}; mean "
        "± standard deviation of several."
    )
    joined = report.over_seeds(shown, ["name", "chosen_by", "link"], columns)
    return [words, report.table(joined)]
