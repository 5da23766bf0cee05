"""Labels of tokens: posteriors and a temperature, chosen by the same held-out texts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

import laplace_lora_ext
from benchmarks.fine_tuning import TEST, TRAIN, Pretrained, fine_tune, prepare
from benchmarks.methods.method import Loaders, Probabilities, fit_temperature
from benchmarks.metrics import quality_with_aurc, shift_detection, signs_of
from benchmarks.models import AdaptedModel
from benchmarks.options import Tokens
from benchmarks.report import Result, Row, counts, over_seeds, say, table
from benchmarks.tasks import WORD_TASKS
from benchmarks.tasks.task import UNLABELLED
from benchmarks.training import Records

HELD_OUT = 0.2
LINK = "mean_field"
FIGURES = ("accuracy", "nll", "ece", "chosen", "logit_scale")


def run(options: Tokens) -> Iterator[Result]:
    """Measure each seed."""
    rows: list[Row] = []
    for seed in options.seeds:
        pretrained = prepare(options, seed, WORD_TASKS)
        rows += Trial(pretrained, options, seed).rows()
        figures = {
            "task": pretrained.description,
            "hyperparameters": asdict(pretrained.hyperparameters),
            "rows": rows,
        }
        yield figures, text_of(pretrained, rows)


@dataclass(frozen=True)
class Trial:
    """One seed: a training without a fifth of the texts, which choose.

    Then comes one on all texts.
    """

    pretrained: Pretrained
    options: Tokens
    seed: int

    def rows(self) -> Iterator[Row]:
        """Measure every method on the labelled tokens of each data set."""
        records = self.pretrained.data[TRAIN]  # in an order that the seed has drawn
        n_rest = len(records) - math.ceil(HELD_OUT * len(records))
        rest, held = records[:n_rest], records[n_rest:]
        say(self.options, f"Seed {self.seed}: training without a fifth")
        first = fine_tune(self.pretrained, rest, self.seed)
        say(self.options, f"Seed {self.seed}: training on all")
        final = fine_tune(self.pretrained, records, self.seed)

        yield self._row("Trained model", final.probabilities(self._loaders))
        of_held = first.logits(self.pretrained.prediction_loader(held))
        temperature = fit_temperature(of_held, labels_of(held))
        tempered = {
            name: (final.logits(loader) / temperature).softmax(-1)
            for name, loader in self._loaders.items()
        }
        yield self._row("Temperature of the held-out texts", tempered, temperature)
        for with_head in (False, True):
            name = "The same with the head" if with_head else "lowrank_kron"
            say(self.options, f"Seed {self.seed}: {name}")
            chosen = self._fitted(first, rest, with_head)
            chosen.optimize_prior_precision(
                method="gridsearch", val_loader=self.pretrained.loader(held)
            )
            la = self._fitted(final, records, with_head)
            la.hyperparameters = chosen.hyperparameters
            yield self._row_of(name, la, "glm")
            if not with_head:
                say(self.options, f"Seed {self.seed}: learnt variance")
                la.amortize(self.pretrained.loader(records))
                yield self._row_of("The same, learnt variance", la, "amortized")

    def _fitted(
        self,
        model: AdaptedModel,
        records: Records,
        with_head: bool,
    ) -> Any:
        """Fit a posterior around a trained model."""
        la: Any = laplace_lora_ext.Laplace(
            model.model, "token_classification", modules_to_save=with_head
        )
        la.fit(self.pretrained.loader(records), progress_bar=not self.options.quiet)
        return la

    def _row_of(
        self,
        name: str,
        la: Any,
        pred_type: str,
    ) -> Row:
        """Measure a posterior."""
        probabilities = {}
        for data_set, loader in self._loaders.items():
            # `fitting` leaves out all tokens without a label.
            parts = [
                la(batch, pred_type=pred_type, link_approx=LINK, fitting=True)
                for batch in loader
            ]
            probabilities[data_set] = torch.cat(parts).detach().cpu()
        chosen = la.prior_precision.mean().item()
        return self._row(name, probabilities, chosen, la.logit_scale)

    def _row(
        self,
        name: str,
        probabilities: Probabilities,
        chosen: float | None = None,
        logit_scale: float | None = None,
    ) -> Row:
        """Measure probabilities of tokens."""
        labels = {each: labels_of(self.pretrained.data[each]) for each in self._loaders}
        signs = {each: signs_of(p) for each, p in probabilities.items()}
        shifted = {}
        for each in self.pretrained.task.shifted:
            figures = quality_with_aurc(probabilities[each], labels[each])
            shifted[each] = figures | shift_detection(signs[TEST], signs[each])
        return {
            "name": name,
            "seed": self.seed,
            "tokens": {each: len(of_set) for each, of_set in labels.items()},
            "chosen": chosen,
            "logit_scale": logit_scale,
            **quality_with_aurc(probabilities[TEST], labels[TEST]),
            "shifted": shifted,
        }

    @cached_property
    def _loaders(self) -> Loaders:
        """Batches of the test texts, and of those of each other distribution."""
        return {
            name: self.pretrained.prediction_loader(self.pretrained.data[name])
            for name in (TEST, *self.pretrained.task.shifted)
        }


def labels_of(records: Records) -> torch.Tensor:
    """Collect the labels `(tokens,)` of all tokens that have one."""
    labels = torch.tensor([label for record in records for label in record["labels"]])
    return labels[labels != UNLABELLED]


def text_of(
    pretrained: Pretrained,
    rows: Sequence[Row],
) -> list[str]:
    """Put the figures in words and a table."""
    task = pretrained.task
    shown = [dict(row) for row in rows]
    columns: list[str] = list(FIGURES)
    for name in task.shifted:
        for figure, title in (
            ("nll", f"NLL of {name}"),
            ("ece", f"ECE of {name}"),
            ("shift_auroc", f"AUROC of {name}"),
        ):
            columns.append(title)
            for row in shown:
                row[title] = row["shifted"][name][figure]
    seeds = sorted({row["seed"] for row in rows})
    words = (
        f"{task.name}: {pretrained.hyperparameters.model} with LoRA, "
        f"{len(task.train)} training texts; {len(task.classes)} classes of tokens, of "
        f"which the last seed's sets have {counts(rows[-1]['tokens'])}. A training "
        "without a fifth of the texts lets them choose for the model that is trained "
        "on all: a temperature, or prior precision and scale of the logits. Figures "
        "are means over labelled tokens; the AUROC is of the entropy of a token. "
        f"Seeds: {', '.join(map(str, seeds))}; mean ± standard deviation of several."
    )
    return [words, table(over_seeds(shown, ("name",), columns))]
