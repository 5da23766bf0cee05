"""One seed of the calibration experiment: fine-tuning, and every method's figures."""

import random
import sys
from collections.abc import Collection, Iterator
from functools import cached_property
from typing import Any

import torch

from benchmarks import metrics
from benchmarks.fine_tuning import PREDICTION_BATCH_SIZE, TEST, Pretrained, fine_tune
from benchmarks.methods import METHODS, posterior
from benchmarks.methods.method import Loaders, Method, PointMethod, Posterior
from benchmarks.methods.priors import Prediction, by_training, by_validation
from benchmarks.models import AdaptedModel
from benchmarks.report import Row
from benchmarks.training import Records

WHOLE, SPLIT = "whole training set", "80/20 split"
POINTS = ("map", "mc_dropout", "checkpoint_ensemble", "deep_ensemble", "temperature_scaling")
CURVATURES = ("diag", "kron", "lowrank_kron_paper", "lowrank_kron", "mean_at_start")
CONTESTANTS = (*POINTS, "last_layer", "first_half", *CURVATURES)
ALONG_TRAINING = (*POINTS, "lowrank_kron_paper", "lowrank_kron")
NO_CLASS = -1  # label of a text for which no class is right
VALIDATION_SHARE = 0.2
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
        names = (TEST, *pretrained.task.shifted)
        self.loaders: Loaders = {
            name: pretrained.loader(name, PREDICTION_BATCH_SIZE) for name in names
        }
        self._labels = {
            name: torch.tensor([one.get("labels", NO_CLASS) for one in pretrained.data[name]])
            for name in names
        }

    def measure(self) -> list[Row]:
        """Figures of each method with one way of choosing and one link, after training."""
        train = self.pretrained.data["train"]
        order = list(range(len(train)))
        random.Random(self.seed).shuffle(order)
        held_out = max(1, round(VALIDATION_SHARE * len(order)))
        validation, rest = (
            [train[place] for place in places] for places in (order[:held_out], order[held_out:])
        )
        rows = self._rows(self._first, train, [])
        return rows + self._rows(fine_tune(self.pretrained, rest, self.seed), rest, validation)

    def measure_along_training(self) -> list[Row]:
        """Figures of methods that need no validation set, at each checkpoint."""
        rows = []
        for step in list(self._first.checkpoints):
            model, train = self._first.at(step), self.pretrained.data["train"]
            rows += [{"step": step, **row} for row in self._rows(model, train, [], ALONG_TRAINING)]
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
        return [
            {name: values[group].mean().item() for name, values in figures.items()}
            for group in figures["margin"].argsort().chunk(GROUPS)
        ]

    @cached_property
    def _first(self) -> AdaptedModel:
        return fine_tune(self.pretrained, self.pretrained.data["train"], self.seed)

    @cached_property
    def _posterior_and_statistics(self) -> tuple[Any, Any]:
        train = self.pretrained.data["train"]
        la = self._fitted(posterior("lowrank_kron"), self._first, train)
        return la, la.predictive_statistics(self.loaders[TEST])

    def _rows(
        self,
        model: AdaptedModel,
        train: Records,
        validation: Records,
        methods: Collection[str] = CONTESTANTS,
    ) -> list[Row]:
        """Figures under one of the protocols: without validation data, or with them."""
        rows, map_classes = [], torch.empty(0)
        protocol = SPLIT if validation else WHOLE
        for method in self.methods:
            if method.key not in methods:
                continue
            if self.pretrained.show_progress:
                print(f"Seed {self.seed}, {protocol}: {method.title}", file=sys.stderr)
            for prediction in self._predictions(method, model, train, validation):
                if method.key == "map":
                    map_classes = prediction.probabilities[TEST].argmax(-1)
                name = {"protocol": protocol, "method": method.key, "name": method.title}
                rows.append({**name, **self._row(prediction, map_classes)})
        return rows

    def _predictions(
        self, method: Method, model: AdaptedModel, train: Records, validation: Records
    ) -> Iterator[Prediction]:
        held_out = self.pretrained.loader(validation, PREDICTION_BATCH_SIZE)
        if isinstance(method, PointMethod):
            if method.needs_validation == bool(validation) or method.key == "map":
                members = method.fit(model, held_out)
                chosen_by = "validation" if method.needs_validation else ""
                found = members.predict(self.loaders)
                yield Prediction(found, chosen_by, chosen=members.temperature)
        elif isinstance(method, Posterior):
            la = self._fitted(method, model, train)
            texts = self.pretrained.loader(train, PREDICTION_BATCH_SIZE)
            data = (texts if method.linearized else None, self.loaders, self.samples)
            yield from by_validation(la, held_out, *data) if validation else by_training(la, *data)

    def _fitted(self, method: Posterior, model: AdaptedModel, records: Records) -> Any:
        la = method.build(model)
        show_progress = self.pretrained.show_progress
        la.fit(self.pretrained.loader(records), progress_bar=show_progress)
        return la

    def _row(self, prediction: Prediction, map_classes: torch.Tensor) -> Row:
        """Figures on the test texts, and on each shifted set."""
        test, labels = prediction.probabilities[TEST], self._labels[TEST]
        row: Row = {
            "seed": self.seed,
            "chosen_by": prediction.chosen_by,
            "link": prediction.link,
            "chosen": prediction.chosen,
            "is_choice": prediction.is_choice,
            **metrics.quality(test, labels),
            "calibrated_ece": metrics.calibrated_ece(test),
            "away_from_map": (test.argmax(-1) != map_classes).double().mean().item(),
            "reliability": metrics.reliability(test, labels),
            "shifted": {},
        }
        for name, shifted in prediction.probabilities.items():
            if name != TEST:
                classes = self._labels[name]
                both = torch.cat([test, shifted]), torch.cat([labels, classes])
                row["shifted"][name] = {
                    **(metrics.quality(shifted, classes) if bool((classes >= 0).all()) else {}),
                    **metrics.shift_detection(test, shifted),
                    "selective_accuracy": metrics.selective_accuracy(*both),
                }
        return row
