"""One seed of the calibration experiment: fine-tuning, and every method's figures."""

import random
import sys
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.fine_tuning import Pretrained, fine_tune
from benchmarks.methods import METHODS, posterior
from benchmarks.methods.method import Loaders, Method, PointMethod, Posterior
from benchmarks.methods.priors import Prediction, by_training, by_validation
from benchmarks.metrics import (
    calibrated_ece,
    quality,
    reliability,
    selective_accuracy,
    shift_detection,
)
from benchmarks.models import AdaptedModel, by_length
from benchmarks.report import Row
from benchmarks.training import Records
from laplace_lora_ext import PredictiveStatistics

WHOLE = "whole training set"
SPLIT = "80/20 split"
CONTESTANTS = (
    "map",
    "mc_dropout",
    "checkpoint_ensemble",
    "deep_ensemble",
    "temperature_scaling",
    "last_layer",
    "first_half",
    "diag",
    "kron",
    "lowrank_kron_paper",
    "lowrank_kron",
    "mean_at_start",
)
ALONG_TRAINING = (*CONTESTANTS[:4], "lowrank_kron_paper", "lowrank_kron")
NO_CLASS = -1  # label of a text for which no class is right
VALIDATION_SHARE = 0.2
PREDICTION_BATCH_SIZE = 8
TEST = "test"
FIRM = 1e12  # a prior precision beside which no curvature counts
GROUPS = 8  # of texts by their margins


class Trial:
    """Fine-tune with one seed, and measure the methods of which the keys are given, beside MAP."""

    def __init__(
        self,
        pretrained: Pretrained,
        samples: int,
        seed: int,
        methods: Collection[str] = CONTESTANTS,
    ) -> None:
        self.pretrained = pretrained
        self.samples = samples
        self.seed = seed
        self.methods = [METHODS[key] for key in CONTESTANTS if key in {"map", *methods}]
        task = pretrained.task
        self.train = pretrained.records(task.train)
        data_sets = {TEST: by_length(pretrained.records(task.test))} | {
            name: by_length(pretrained.records(examples)) for name, examples in task.shifted.items()
        }
        self.loaders: Loaders = {
            name: pretrained.loader(records, PREDICTION_BATCH_SIZE)
            for name, records in data_sets.items()
        }
        self._labels = {
            name: torch.tensor([record.get("labels", NO_CLASS) for record in records])
            for name, records in data_sets.items()
        }

    def measure(self) -> list[Row]:
        """Figures of each method with one way of choosing and one link, after training."""
        order = list(range(len(self.train)))
        random.Random(self.seed).shuffle(order)
        held_out = max(1, round(VALIDATION_SHARE * len(order)))
        validation, train = (
            [self.train[place] for place in places]
            for places in (order[:held_out], order[held_out:])
        )
        rows = self._measure_protocol(WHOLE, self._first, self._without_validation)
        model = fine_tune(self.pretrained, train, self.seed)
        return rows + self._measure_protocol(
            SPLIT,
            model,
            lambda method, model: self._with_validation(method, model, train, validation),
        )

    def measure_along_training(self) -> list[Row]:
        """Figures of methods that need no validation set, at each checkpoint."""
        rows = []
        for step in list(self._first.checkpoints):
            model = self._first.at(step)
            rows += self._measure_protocol(
                WHOLE, model, self._without_validation, ALONG_TRAINING, step=step
            )
        return rows

    def variance_by_layer(self) -> dict[str, float]:
        """Shares of the layers in the variance of the test texts' logits.

        Under the evidence's layerwise prior precision.
        """
        la, statistics = self._posterior_and_statistics
        la.optimize_prior_precision(method="marglik", prior_structure="layerwise")
        return la.variance_by_layer(statistics).by_layer

    def jacobians_by_margin(self) -> list[dict[str, float]]:
        """How far the weights can move what the model prefers, where it is sure and where not.

        The margin of a test text is the difference of its two largest logits. A variance grows with
        the squared norm of the margin's Jacobian, whatever the posterior. Means over groups of as
        many texts each, from the smallest margins to the largest.
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
        order = figures["margin"].argsort()
        return [
            {name: values[group].mean().item() for name, values in figures.items()}
            for group in order.chunk(GROUPS)
        ]

    @cached_property
    def _first(self) -> AdaptedModel:
        return fine_tune(self.pretrained, self.train, self.seed)

    @cached_property
    def _posterior_and_statistics(self) -> tuple[Any, PredictiveStatistics]:
        la = self._fitted(posterior("lowrank_kron"), self._first, self.train)
        return la, la.predictive_statistics(self.loaders[TEST])

    def _measure_protocol(
        self,
        protocol: str,
        model: AdaptedModel,
        predictions_of: Callable[[Method, AdaptedModel], Iterator[Prediction]],
        methods: Collection[str] = CONTESTANTS,
        **place: int,
    ) -> list[Row]:
        rows = []
        map_classes = torch.empty(0)
        for method in self.methods:
            if method.key not in methods:
                continue
            self._tell(f"{protocol}: {method.title}")
            for prediction in predictions_of(method, model):
                if method.key == "map":
                    map_classes = prediction.probabilities[TEST].argmax(-1)
                name = {"protocol": protocol, **place, "method": method.key, "name": method.title}
                rows.append(name | self._row(prediction, map_classes))
        return rows

    def _without_validation(self, method: Method, model: AdaptedModel) -> Iterator[Prediction]:
        if isinstance(method, PointMethod) and not method.needs_validation:
            yield Prediction(method.fit(model, None).predict(self.loaders))
        elif isinstance(method, Posterior):
            la = self._fitted(method, model, self.train)
            train = self._small_batches(self.train) if method.linearized else None
            yield from by_training(la, train, self.loaders, self.samples)

    def _with_validation(
        self, method: Method, model: AdaptedModel, train: Records, validation: Records
    ) -> Iterator[Prediction]:
        held_out = self._small_batches(validation)
        if isinstance(method, PointMethod) and (method.needs_validation or method.key == "map"):
            members = method.fit(model, held_out)
            chosen_by = "validation" if method.needs_validation else ""
            yield Prediction(members.predict(self.loaders), chosen_by, chosen=members.temperature)
        elif isinstance(method, Posterior):
            la = self._fitted(method, model, train)
            linearized = self._small_batches(train) if method.linearized else None
            yield from by_validation(la, held_out, linearized, self.loaders, self.samples)

    def _fitted(self, method: Posterior, model: AdaptedModel, records: Records) -> Any:
        la = method.build(model)
        loader = self.pretrained.loader(records, self.pretrained.hyperparameters.batch_size)
        la.fit(loader, progress_bar=self.pretrained.show_progress)
        return la

    def _small_batches(self, records: Records) -> DataLoader:
        return self.pretrained.loader(records, PREDICTION_BATCH_SIZE)

    def _tell(self, text: str) -> None:
        if self.pretrained.show_progress:
            print(f"Seed {self.seed}: {text}", file=sys.stderr)

    def _row(self, prediction: Prediction, map_classes: torch.Tensor) -> Row:
        """Figures on the test texts, and on each shifted set."""
        test, labels = prediction.probabilities[TEST], self._labels[TEST]
        row: Row = {
            "seed": self.seed,
            "chosen_by": prediction.chosen_by,
            "link": prediction.link,
            "chosen": prediction.chosen,
            "is_choice": prediction.is_choice,
            **quality(test, labels),
            "calibrated_ece": calibrated_ece(test),
            "away_from_map": (test.argmax(-1) != map_classes).double().mean().item(),
            "reliability": reliability(test, labels),
            "shifted": {},
        }
        for name, probabilities in prediction.probabilities.items():
            if name == TEST:
                continue
            shifted_labels = self._labels[name]
            has_labels = bool((shifted_labels >= 0).all())
            both = torch.cat([test, probabilities])
            row["shifted"][name] = {
                **(quality(probabilities, shifted_labels) if has_labels else {}),
                **shift_detection(test, probabilities),
                "selective_accuracy": selective_accuracy(both, torch.cat([labels, shifted_labels])),
            }
        return row
