"""One seed of the calibration benchmark: fine-tuning, and every method's figures."""

import random
import sys
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from typing import Any

import torch

from benchmarks.calibration.fine_tuned import Pretrained, Records, fine_tune
from benchmarks.calibration.methods import (
    CHECKPOINT_ENSEMBLE,
    DEEP_ENSEMBLE,
    MC_DROPOUT,
    TEMPERATURE_SCALING,
    Evaluation,
    Prediction,
    deep_ensemble,
)
from benchmarks.calibration.posteriors import Posterior, posteriors
from benchmarks.calibration.protocols import SPLIT, WHOLE
from benchmarks.metrics import (
    calibrated_ece,
    quality,
    reliability,
    selective_accuracy,
    shift_detection,
)
from benchmarks.minilm import by_length
from laplace_lora_ext import PredictiveStatistics

ENSEMBLE_SIZE = 3
MEMBER_SEEDS = 1000  # between the seeds of an ensemble's members
NO_CLASS = -1  # label of a text for which no class is right
VALIDATION_SHARE = 0.2
TEST = "test"
_FIRM = 1e12  # a prior precision beside which no curvature counts
_GROUPS = 8  # of texts by their margins
ALONG_TRAINING = ("lowrank_kron (paper)", "lowrank_kron")


class Trial:
    """Fine-tune with one seed, and measure every method.

    Parameters
    ----------
    pretrained : Pretrained
        The model and its task.
    samples : int
        Samples of the logits with Monte-Carlo links.
    seed : int
        Seed of the fine-tuning and of the split.
    methods : collection of str, optional
        Names of the methods to measure beside MAP; all if not given.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        samples: int,
        seed: int,
        methods: Collection[str] | None = None,
    ) -> None:
        self.pretrained = pretrained
        self.samples = samples
        self.seed = seed
        self.methods = methods
        task = pretrained.task
        self.train = pretrained.records(task.train)
        self.data_sets = {TEST: by_length(pretrained.records(task.test))}
        for name, examples in task.shifted.items():
            self.data_sets[name] = by_length(pretrained.records(examples))
        self._labels = {
            name: torch.tensor([record.get("labels", NO_CLASS) for record in records])
            for name, records in self.data_sets.items()
        }

    def measure(self) -> list[dict[str, Any]]:
        """Measure every method after training.

        Returns
        -------
        rows : list of dict
            Figures of one method, with one way of choosing and one link, each.
        """
        rows = []
        for protocol, predictions in (
            (WHOLE, self._without_validation()),
            (SPLIT, self._with_validation()),
        ):
            of_map: Prediction | None = None
            for prediction in predictions:
                of_map = of_map or prediction
                rows.append({"protocol": protocol, **self._row(prediction, of_map)})
        return rows

    def measure_along_training(self) -> list[dict[str, Any]]:
        """Measure the methods that need no validation set at each checkpoint.

        Returns
        -------
        rows : list of dict
            Figures of one method at one step each.
        """
        members = self._members if self._wants(DEEP_ENSEMBLE) else [self._first]
        chosen = [posterior for posterior in self._posteriors() if posterior.name in ALONG_TRAINING]
        first = self._first
        steps = list(first.fine_tuned.checkpoints)
        rows = []
        for number, step in enumerate(steps, start=1):
            for member in members:
                member.fine_tuned.restore(step)
            predictions = [first.map(), *self._ensembles(steps[:number])]
            for posterior in chosen:
                predictions += list(first.by_evidence(posterior))
            rows += [
                {"protocol": WHOLE, "step": step, **self._row(prediction, predictions[0])}
                for prediction in predictions
            ]
        return rows

    def variance_by_layer(self) -> dict[str, float]:
        """Shares of the transformer layers in the variance of the test texts' logits.

        Returns
        -------
        shares : dict
            By the layer's name, under the evidence's layerwise prior precision.
        """
        la, statistics = self._posterior_and_statistics
        la.optimize_prior_precision(method="marglik", prior_structure="layerwise")
        return la.variance_by_layer(statistics).by_layer

    def jacobians_by_margin(self) -> list[dict[str, float]]:
        """How far the weights can move what the model prefers, where it is sure and where not.

        The margin of a test text is the difference of its two largest logits. A variance grows with
        the squared norm of the margin's Jacobian, whatever the posterior.

        Returns
        -------
        groups : list of dict
            For groups of as many texts each, from the smallest margins to the largest: the means of
            "margin", "squared_norm" and "accuracy".
        """
        _, statistics = self._posterior_and_statistics
        f_mu, labels = statistics.f_mu, self._labels[TEST]
        # Under a prior that outweighs the data, the covariance is that of the Jacobians alone.
        covariance = _FIRM * statistics.moments(torch.tensor([_FIRM])).f_var
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
            for group in order.chunk(_GROUPS)
        ]

    @cached_property
    def _posterior_and_statistics(self) -> tuple[Any, PredictiveStatistics]:
        first = self._first
        la = Posterior("lowrank_kron").fit(self.pretrained, first.fine_tuned, self.train)
        return la, la.predictive_statistics(first.loaders[TEST])

    def _without_validation(self) -> Iterator[Prediction]:
        first = self._first
        yield first.map()
        yield from self._ensembles(list(first.fine_tuned.checkpoints))
        for posterior in self._posteriors():
            self._tell(f"{posterior.name}, evidence")
            yield from first.by_evidence(posterior)

    def _ensembles(self, steps: list[int]) -> Iterator[Prediction]:
        """Averages over models; the checkpoints are those after some of the steps."""
        first = self._first
        averages: dict[str, Callable[[], Prediction]] = {
            MC_DROPOUT: first.monte_carlo_dropout,
            CHECKPOINT_ENSEMBLE: lambda: first.checkpoint_ensemble(steps),
            DEEP_ENSEMBLE: lambda: deep_ensemble(self._members),
        }
        return (predict() for name, predict in averages.items() if self._wants(name))

    def _wants(self, method: str) -> bool:
        return self.methods is None or method in self.methods

    def _with_validation(self) -> Iterator[Prediction]:
        order = list(range(len(self.train)))
        random.Random(self.seed).shuffle(order)
        held_out = max(1, round(VALIDATION_SHARE * len(order)))
        validation = [self.train[place] for place in order[:held_out]]
        train = [self.train[place] for place in order[held_out:]]
        evaluation = self._evaluation(train, self.seed)
        yield evaluation.map()
        if self._wants(TEMPERATURE_SCALING):
            yield evaluation.temperature_scaling(validation)
        for posterior in self._posteriors():
            self._tell(f"{posterior.name}, validation")
            yield from evaluation.by_validation(posterior, validation)

    @cached_property
    def _first(self) -> Evaluation:
        return self._evaluation(self.train, self.seed)

    @cached_property
    def _members(self) -> list[Evaluation]:
        others = range(1, ENSEMBLE_SIZE)
        seeds = [self.seed + MEMBER_SEEDS * number for number in others]
        return [self._first, *(self._evaluation(self.train, seed) for seed in seeds)]

    def _evaluation(self, train: Records, seed: int) -> Evaluation:
        fine_tuned = fine_tune(self.pretrained, train, seed)
        return Evaluation(self.pretrained, fine_tuned, train, self.data_sets, self.samples)

    def _posteriors(self) -> list[Posterior]:
        layers = self._first.fine_tuned.model.config.num_hidden_layers
        known = posteriors(layers, self.pretrained.task.is_prompt)
        return [posterior for posterior in known if self._wants(posterior.name)]

    def _tell(self, text: str) -> None:
        if self.pretrained.show_progress:
            print(f"Seed {self.seed}: {text}", file=sys.stderr)

    def _row(self, prediction: Prediction, of_map: Prediction) -> dict[str, Any]:
        """Figures on the test texts, and on each shifted set."""
        test, labels = prediction.probabilities[TEST], self._labels[TEST]
        map_classes = of_map.probabilities[TEST].argmax(-1)
        row: dict[str, Any] = {
            "seed": self.seed,
            "method": prediction.method,
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
