"""Several labels, or labels of tokens: posteriors beside a temperature."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.fine_tuning import TEST, TRAIN, Pretrained, fine_tune, prepare
from benchmarks.held_out import TrainedTwice
from benchmarks.methods.method import Loaders, Probabilities, fit_temperature
from benchmarks.methods.posteriors import LINK, probabilities
from benchmarks.metrics import quality_with_aurc, shift_detection, signs_of
from benchmarks.models import AdaptedModel
from benchmarks.options import Labels
from benchmarks.report import Result, Row, counts, over_seeds, say, seeds_of, table
from benchmarks.tasks import LABELLED_TASKS
from benchmarks.tasks.task import UNLABELLED
from benchmarks.training import Records
from laplace_lora_ext import LowRankKronLoRALaplace
from laplace_lora_ext.tasks import TASKS

FIGURES = ("accuracy", "exact", "nll", "ece", "chosen", "logit_scale")
# Of shifted sets, with their titles in the table.
OF_SHIFTED = {"nll": "NLL", "ece": "ECE", "shift_auroc": "AUROC"}


def run(options: Labels) -> Iterator[Result]:
    """Measure each seed."""
    rows: list[Row] = []
    for seed in options.seeds:
        pretrained = prepare(options, seed, LABELLED_TASKS)
        rows += Trial(pretrained, options, seed).rows()
        figures = {**pretrained.figures, "rows": rows}
        yield figures, text_of(pretrained, rows)


@dataclass(frozen=True)
class Trial:
    """One seed: a training without a fifth of the texts, which choose.

    Then comes one on all texts.
    """

    pretrained: Pretrained
    options: Labels
    seed: int

    def rows(self) -> Iterator[Row]:
        """Measure every method on the labels of each data set."""
        trained = TrainedTwice.by(
            partial(fine_tune, self.pretrained, seed=self.seed),
            self.pretrained,
            self._likelihood,
            self.seed,
        )
        yield self._row("Trained model", self._tempered(trained.final, 1.0))
        temperature = self._temperature_of(trained)
        tempered = self._tempered(trained.final, temperature)
        yield self._row("Temperature of the held-out texts", tempered, temperature)
        say(self.options, f"Seed {self.seed}: lowrank_kron")
        la = trained.posterior(with_head=False)
        yield self._row_of("lowrank_kron", la, "glm")
        say(self.options, f"Seed {self.seed}: learnt variance")
        la.amortize(self.pretrained.loader(self.pretrained.data[TRAIN]))
        yield self._row_of("The same, learnt variance", la, "amortized")
        say(self.options, f"Seed {self.seed}: The same with the head")
        la = trained.posterior(with_head=True)
        yield self._row_of("The same with the head", la, "glm")

    def _temperature_of(self, trained: TrainedTwice) -> float:
        """Find the temperature that suits the first model, by the held-out labels."""
        held = trained.split.held
        logits = self._logits(trained.first, self.pretrained.prediction_loader(held))
        return fit_temperature(logits, labels_of(held))

    @property
    def _likelihood(self) -> str:
        if self.pretrained.task.labels_words:
            return "token_classification"
        return "multi_label_classification"

    def _logits(self, model: AdaptedModel, loader: Iterable[Any]) -> Tensor:
        """Compute logits `(labels, classes)` of a trained model, for a softmax."""
        likelihood = TASKS[self._likelihood]
        # A label by itself, right or wrong, has one logit, and a softmax two.
        logits = likelihood.class_logits(model.logits(loader))
        # A label counts alike, whichever text it is of.
        return logits.flatten(0, -2)

    def _tempered(self, model: AdaptedModel, temperature: float) -> Probabilities:
        """Predict by a trained model, at a temperature."""
        tempered = {}
        for name, loader in self._loaders.items():
            logits = self._logits(model, loader) / temperature
            tempered[name] = logits.softmax(-1)
        return tempered

    def _row_of(
        self,
        name: str,
        la: LowRankKronLoRALaplace,
        pred_type: str,
    ) -> Row:
        """Measure a posterior."""
        predicted = {}
        for data_set, loader in self._loaders.items():
            # `fitting` leaves out all tokens without a label.
            parts = [
                probabilities(la, batch, LINK, pred_type=pred_type, fitting=True)
                for batch in loader
            ]
            of_labels = torch.cat(parts)
            predicted[data_set] = of_labels.flatten(0, -2)
        chosen = la.prior_precision.mean().item()
        return self._row(name, predicted, chosen, la.logit_scale)

    def _row(
        self,
        name: str,
        predicted: Probabilities,
        chosen: float | None = None,
        logit_scale: float | None = None,
    ) -> Row:
        """Measure probabilities `(labels, classes)`."""
        data = self.pretrained.data
        labels = {each: labels_of(data[each]) for each in self._loaders}
        n_labels = {each: len(of_set) for each, of_set in labels.items()}
        signs = {each: signs_of(p) for each, p in predicted.items()}
        shifted = {}
        for each in self.pretrained.task.shifted:
            figures = quality_with_aurc(predicted[each], labels[each])
            detected = shift_detection(signs[TEST], signs[each])
            shifted[each] = figures | detected
        of_test = predicted[TEST]
        return {
            "name": name,
            "seed": self.seed,
            "labels": n_labels,
            "chosen": chosen,
            "logit_scale": logit_scale,
            **quality_with_aurc(of_test, labels[TEST]),
            "exact": exact_matches(of_test, data[TEST]),
            "shifted": shifted,
        }

    @cached_property
    def _loaders(self) -> Loaders:
        """Make batches of the test texts, and of each other distribution."""
        return {
            name: self.pretrained.prediction_loader(self.pretrained.data[name])
            for name in (TEST, *self.pretrained.task.shifted)
        }


def labels_of(records: Records) -> Tensor:
    """Collect all labels of all texts, `(labels,)`; tokens without one are left out."""
    labels = torch.tensor([label for record in records for label in record["labels"]])
    # Whole numbers, as classes are: a loss of several labels needs them as floats.
    return labels[labels != UNLABELLED].long()


def exact_matches(probabilities: Tensor, records: Records) -> float:
    """Compute the share of texts all of whose labels are the most probable ones."""
    is_right = probabilities.argmax(-1) == labels_of(records)
    n_labels = [len(labels_of([record])) for record in records]
    is_exact = [of_text.all() for of_text in is_right.split(n_labels)]
    return torch.stack(is_exact).double().mean().item()


def text_of(
    pretrained: Pretrained,
    rows: Sequence[Row],
) -> list[str]:
    """Put the figures in words and a table."""
    task = pretrained.task
    # Copies: what is added for the table is no part of the figures.
    shown = [dict(row) for row in rows]
    columns: list[str] = list(FIGURES)
    for name in task.shifted:
        for figure, beginning in OF_SHIFTED.items():
            title = f"{beginning} of {name}"
            columns.append(title)
            for row in shown:
                row[title] = row["shifted"][name][figure]
    kind = "classes of tokens" if task.labels_words else "labels for each text"
    words = (
        f"{task.name}: {pretrained.hyperparameters.model} with LoRA, "
        f"{len(task.train)} training texts; {len(task.classes)} {kind} "
        f"({', '.join(task.classes)}). The last seed's sets have "
        f"{counts(rows[-1]['labels'])}. A training without a fifth of the texts lets "
        "them choose for the model that is trained on all: a temperature, or prior "
        "precision and scale of the logits. Figures are means over labels, and "
        '"Exact" is the share of texts all of whose labels are right; the AUROC is of '
        "the entropy of a label. "
        f"Seeds: {seeds_of(rows)}; mean ± standard deviation of several."
    )
    return [words, table(over_seeds(shown, ("name",), columns))]
