"""Every method on models fine-tuned with several seeds, under the paper's two protocols."""

import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch.utils.benchmark import timer
from torch.utils.data import DataLoader

from benchmarks import metrics
from benchmarks.experiments.calibration_report import ENSEMBLES, SPLIT, WHOLE, draw, text_of
from benchmarks.fine_tuning import PREDICTION_BATCH_SIZE, TEST, Pretrained, fine_tune, prepare
from benchmarks.measuring import seconds_of
from benchmarks.methods import METHODS, posterior, priors
from benchmarks.methods import method as points
from benchmarks.methods.method import Method, PointMethod, Posterior
from benchmarks.methods.priors import Choice, Prediction, Prior
from benchmarks.models import AdaptedModel
from benchmarks.options import Calibration
from benchmarks.report import Figures, Result, Row, say
from benchmarks.training import Records
from laplace_lora_ext.metrics import quality, reliability

POINTS = ("map", *ENSEMBLES, "temperature_scaling")
CURVATURES = ("diag", "kron", "lowrank_kron_paper", "lowrank_kron", "drawn_labels", "mean_at_start")
CONTESTANTS = (*POINTS, "last_layer", "first_half", *CURVATURES)
ALONG_TRAINING = (*POINTS, "lowrank_kron_paper", "lowrank_kron")
VALIDATION_SHARE = 0.2
FIRM = 1e12  # a prior precision that outweighs any curvature
GROUPS = 8  # of texts by their margins
TIMED_BATCHES = 4  # of a posterior's predictions


def run(options: Calibration) -> Iterator[Result]:
    """Measure each seed, and report after it, so that a run of hours may be cut off."""
    methods = chosen_methods(options.methods)
    figures: Figures = {"methods": []}
    for seed in options.seeds:
        pretrained = prepare(options, seed)
        trial = Trial(pretrained, seed, methods)
        figures["methods"] += trial.measure()
        if seed == options.seeds[0]:
            figures |= {
                "task": pretrained.description,
                "hyperparameters": asdict(pretrained.hyperparameters),
                "variance_by_layer": trial.variance_by_layer(),
                "jacobians_by_margin": trial.jacobians_by_margin(),
                "along_training": trial.measure_along_training() if options.curves else [],
            }
        yield figures, text_of(figures)
        draw(figures, options.output)


def chosen_methods(names: Collection[str] | None) -> list[str]:
    """Keys of the methods asked for by key or title; all of them by default."""
    titles = {key: METHODS[key].title for key in CONTESTANTS}
    asked = set(names or CONTESTANTS)
    if unknown := asked - {*titles.keys(), *titles.values()}:
        listed = ", ".join(f"{key} ({title})" for key, title in titles.items())
        raise SystemExit(f"No method is called {unknown.pop()!r}; known are: {listed}.")
    return [key for key, title in titles.items() if asked & {key, title}]


def held_out(records: Records, seed: int) -> tuple[Records, Records]:
    """A fifth of the training texts for validation, and the others."""
    shuffled, count = list(records), max(1, round(VALIDATION_SHARE * len(records)))
    random.Random(seed).shuffle(shuffled)
    return shuffled[:count], shuffled[count:]


@dataclass(frozen=True)
class Protocol:
    """What to train on, what to choose with, and the rows of a training that chose with some."""

    title: str
    train: Records
    validation: Records = field(default_factory=list)
    validated: Sequence[Row] = ()

    def validated_by(self, method: Method, prior: Prior) -> dict[str, float]:
        """Temperature or prior precision that validation data chose for a method, by the link."""
        wanted = method.key, prior.key
        rows = [row for row in self.validated if (row["method"], row["prior"]) == wanted]
        return {row["link"]: row["chosen"] for row in rows}


class Trial:
    """One seed: fine-tune, then measure MAP and the methods with these keys."""

    def __init__(self, pretrained: Pretrained, seed: int, keys: Collection[str]) -> None:
        self.pretrained, self.options, self.seed = pretrained, pretrained.options, seed
        self.methods = [METHODS[key] for key in CONTESTANTS if key in {"map", *keys}]
        self.loaders = {name: self._batches(name) for name in (TEST, *pretrained.task.shifted)}
        self._labels = {name: points.labels_of(loader) for name, loader in self.loaders.items()}

    def measure(self) -> list[Row]:
        """Measure the trained model: a row per method, prior and link."""
        train = self.pretrained.data["train"]
        if self.options.whole:
            return self._rows(self._first, Protocol(WHOLE, train))
        validation, rest = held_out(train, self.seed)
        split = Protocol(SPLIT, rest, validation)
        validated = self._rows(fine_tune(self.pretrained, rest, self.seed), split)
        return self._rows(self._first, Protocol(WHOLE, train, validated=validated)) + validated

    def measure_along_training(self) -> list[Row]:
        """Measure methods that need no validation data at each checkpoint."""
        rows, whole = [], Protocol(WHOLE, self.pretrained.data["train"])
        for step in list(self._first.checkpoints):
            of_step = self._rows(self._first.at(step), whole, ALONG_TRAINING)
            rows += [{"step": step, **row} for row in of_step]
        return rows

    def variance_by_layer(self) -> dict[str, float]:
        """Each layer's share of the variance of the test logits, with the prior by evidence."""
        la, statistics = self._posterior_and_statistics
        la.optimize_prior_precision(method="marglik", prior_structure="layerwise")
        return la.variance_by_layer(statistics)

    def jacobians_by_margin(self) -> list[dict[str, float]]:
        """How far the weights can move the model's choice, where it is sure and where it isn't.

        A text's margin is the difference of its two largest logits; these are means over groups of
        texts with similar margins. Under any posterior, the variance of a margin grows with the
        squared norm of its Jacobian.
        """
        _, statistics = self._posterior_and_statistics
        f_mu, labels = statistics.f_mu, self._labels[TEST]
        # Under a prior that outweighs the data, the covariance is that of the Jacobians alone.
        covariance = FIRM * statistics.moments(torch.tensor([FIRM])).f_var
        signs = torch.tensor([1.0, -1.0]).expand(len(f_mu), 2)
        difference = torch.zeros_like(f_mu).scatter(1, f_mu.topk(2).indices, signs)
        figures = {
            "margin": (f_mu * difference).sum(1),
            "squared_norm": torch.einsum("bc,bcd,bd->b", difference, covariance, difference),
            "accuracy": (f_mu.argmax(-1) == labels).double(),
        }
        return [
            {name: values[group].mean().item() for name, values in figures.items()}
            for group in figures["margin"].argsort().chunk(GROUPS)
        ]

    @cached_property
    def _first(self) -> AdaptedModel:
        return fine_tune(self.pretrained, self.pretrained.data["train"], self.seed)

    @cached_property
    def _posterior_and_statistics(self) -> tuple[Any, Any]:
        la = self._fitted(posterior("lowrank_kron"), self._first, self.pretrained.data["train"])
        return la, la.predictive_statistics(self.loaders[TEST])

    def _rows(self, model: AdaptedModel, protocol: Protocol, keys: Any = CONTESTANTS) -> list[Row]:
        """Measure under one protocol: without validation data, or with them."""
        rows, map_classes = [], torch.empty(0)
        for method in (method for method in self.methods if method.key in keys):
            say(self.options, f"Seed {self.seed}, {protocol.title}: {method.title}")
            for prediction, seconds in self._predictions(method, model, protocol):
                if method.key == "map":
                    map_classes = prediction.probabilities[TEST].argmax(-1)
                name = {"protocol": protocol.title, "method": method.key, "name": method.title}
                row = row_of(prediction, self._labels, map_classes)
                rows.append({"seed": self.seed, **name, **seconds, **row})
        return rows

    def _predictions(
        self, method: Method, model: AdaptedModel, protocol: Protocol
    ) -> Iterator[tuple[Prediction, dict[str, float]]]:
        """Predictions, and the seconds it took to fit and to predict the test texts."""
        test, started = self.loaders[TEST], timer()
        if isinstance(method, PointMethod):
            for prior, members in self._members(method, model, protocol):
                seconds = {"fit_seconds": timer() - started}
                started = timer()
                found = members.predict({TEST: test})
                seconds["predict_seconds"] = timer() - started
                shifted = {name: self.loaders[name] for name in self.pretrained.task.shifted}
                found |= members.predict(shifted)
                yield Prediction(found, prior, chosen=members.temperature), seconds
        elif isinstance(method, Posterior):
            la = self._fitted(method, model, protocol.train)
            seconds = {"fit_seconds": timer() - started}
            batches = list(islice(test, TIMED_BATCHES))
            each = seconds_of(lambda: [la(batch, link_approx="probit") for batch in batches])
            seconds["predict_seconds"] = each * len(test) / len(batches)
            if protocol.validation:
                validation = self._batches(protocol.validation)
                choices = [*priors.by_validation(la, validation, self.options.samples)]
            else:
                train = self._batches(protocol.train) if method.on_training else None
                choices = [*priors.by_training(la, train), *self._elsewhere(la, method, protocol)]
            for prediction in priors.predictions(la, choices, self.loaders, self.options.samples):
                yield prediction, seconds

    def _members(
        self, method: PointMethod, model: AdaptedModel, protocol: Protocol
    ) -> Iterator[tuple[Prior, points.Members]]:
        """What a method without a posterior comes to under a protocol, if anything."""
        if method.needs_validation and not protocol.validation:
            for temperature in protocol.validated_by(method, priors.TEMPERATURE).values():
                yield priors.ELSEWHERE, points.at_temperature(model, temperature)
        elif method.needs_validation == bool(protocol.validation) or method.key == "map":
            data = (self._batches(protocol.train), self._batches(protocol.validation))
            prior = priors.TEMPERATURE if method.needs_validation else priors.NO_PRIOR
            yield prior, method.fit(model, *data)

    def _elsewhere(self, la: Any, method: Posterior, protocol: Protocol) -> Iterator[Choice]:
        """What texts that other trainings held out choose."""
        for link, value in protocol.validated_by(method, priors.GRID_SEARCH).items():
            yield Choice(priors.ELSEWHERE, torch.tensor([value]), {link: math.nan})
        if self.options.trainings > 1 and method.key == "lowrank_kron":
            la.optimize_prior_precision(
                method="second_training",
                train=lambda data: fine_tune(self.pretrained, list(data), self.seed).model,
                train_loader=self.pretrained.loader(protocol.train),
                trainings=self.options.trainings,
            )
            yield Choice(priors.SEVERAL, la.prior_precision.clone(), {"mean_field": math.nan})

    def _batches(self, records: Records | str) -> DataLoader:
        return self.pretrained.loader(records, PREDICTION_BATCH_SIZE)

    def _fitted(self, method: Posterior, model: AdaptedModel, records: Records) -> Any:
        la = method.build(model)
        la.fit(self.pretrained.loader(records), progress_bar=not self.options.quiet)
        return la


def row_of(
    prediction: Prediction, labels_of: Mapping[str, torch.Tensor], map_classes: torch.Tensor
) -> Row:
    """Measure the test texts and each shifted set."""
    found, prior = prediction.probabilities, prediction.prior
    test, labels = found[TEST], labels_of[TEST]
    row: Row = {
        **{"prior": prior.key, "chosen_by": prior.title},
        **{key: getattr(prediction, key) for key in ("link", "chosen", "is_choice", "regret")},
        **quality(test, labels),
        "calibrated_ece": metrics.calibrated_ece(test),
        "away_from_map": (test.argmax(-1) != map_classes).double().mean().item(),
        "reliability": reliability(test, labels),
        "shifted": {},
    }
    for name in (name for name in found if name != TEST):
        shifted, classes = found[name], labels_of[name]
        both = torch.cat([test, shifted]), torch.cat([labels, classes])
        row["shifted"][name] = {
            **(quality(shifted, classes) if bool((classes >= 0).all()) else {}),
            **metrics.shift_detection(test, shifted),
            "selective_accuracy": metrics.selective_accuracy(*both),
        }
    return row
