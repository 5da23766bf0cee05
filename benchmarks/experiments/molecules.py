"""Numbers instead of classes: a property of molecules, predicted with honest doubt."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from benchmarks.fine_tuning import TEST, TRAIN, Pretrained, untrained
from benchmarks.frozen import frozen_features, gaussian_process
from benchmarks.held_out import HELD_OUT, TrainedTwice
from benchmarks.models import (
    AdaptedModel,
    MissingDataError,
    encoder_folder,
    load_tokenizer,
)
from benchmarks.options import Molecules
from benchmarks.report import Figures, Result, Row, cell, over_seeds, say, table
from benchmarks.tasks.balanced import ENCODER
from benchmarks.tasks.task import Example, Task
from benchmarks.training import Checkpoints, Recipe, Records, read_or_train, train
from laplace_lora_ext import LoRALaplace
from laplace_lora_ext.metrics import quality_of_numbers
from laplace_lora_ext.predictive.moments import Moments
from laplace_lora_ext.predictive.numbers import NumberPrediction

PROPERTIES = {
    "photoswitches": "Pi-Pi* Transition Wavelength",
    "redox_mer": "Ered",
}
# A SMILES string has about a token a letter.
SETTINGS = replace(ENCODER, maximum_length=128, checkpoints=1)
# By their names in tables: whether the head has a posterior too.
POSTERIORS = {"lowrank_kron": False, "The same with the head": True}
OVERRIDES = ("steps", "learning_rate", "batch_size")
FIGURES = ("rmse", "nll", "coverage", "crps")


class Unit(NamedTuple):
    """Standardises targets by the training targets' mean and deviation.

    Not by those of all targets, of which a method knows the training ones alone.
    """

    mean: float
    std: float

    @classmethod
    def of(cls, targets: Sequence[float]) -> "Unit":
        """Compute the unit of training targets."""
        values = torch.tensor(targets, dtype=torch.float64)
        return cls(values.mean().item(), values.std().item())


def run(options: Molecules) -> Iterator[Result]:
    """Measure each seed."""
    rows: list[Row] = []
    for seed in options.seeds:
        task, unit = read(options, seed)
        trial = Trial(prepared(options, task), options, seed, unit)
        rows += trial.rows()
        figures = {
            "task": description_of(task),
            "hyperparameters": asdict(trial.pretrained.hyperparameters),
            "rows": rows,
        }
        yield figures, text_of(trial.pretrained, rows)


def read(
    options: Molecules,
    seed: int,
) -> tuple[Task, Unit]:
    """Draw molecules to train on and others to test on; no molecule is drawn twice."""
    if options.data is None:
        raise MissingDataError(
            f"molecules reads molecules/{options.task}.csv with columns SMILES and "
            f"{PROPERTIES[options.task]}: give --data FOLDER."
        )
    file = options.data / "molecules" / f"{options.task}.csv"
    if not file.exists():
        raise MissingDataError(f"There is no {file}.")
    # Some molecules have several rows: a known one must not be predicted.
    frame = pd.read_csv(file).drop_duplicates("SMILES")
    properties = frame[PROPERTIES[options.task]]
    molecules = list(zip(frame["SMILES"], properties, strict=True))
    n_train, n_test = options.train_examples, options.test_examples
    n_least = 1 / HELD_OUT  # a fifth of fewer is less than one
    n_most = len(molecules) - 1  # one at least is left to be predicted
    if n_train < n_least or n_train > n_most:
        raise SystemExit(
            f"--train-examples must be from {n_least:.0f} to {n_most}: "
            f"{options.task} has {len(molecules)} molecules."
        )
    random.Random(seed).shuffle(molecules)
    known = [target for _, target in molecules[:n_train]]
    unit = Unit.of(known)
    examples = []
    for smiles, target in molecules:
        standardised = (target - unit.mean) / unit.std
        examples.append(Example(smiles, standardised))
    task = Task(
        name=options.task,
        classes=[PROPERTIES[options.task]],
        is_prompt=False,
        train=examples[:n_train],
        test=examples[n_train : n_train + n_test],
    )
    return task, unit


def description_of(task: Task) -> Figures:
    """Describe the task in figures."""
    return {"name": task.name, TRAIN: len(task.train), TEST: len(task.test)}


def prepared(options: Molecules, task: Task) -> Pretrained:
    """Find the encoder, which gets a head of one output."""
    folder: Path = encoder_folder()
    settings = SETTINGS.asked(options, OVERRIDES)
    return Pretrained(task, settings, load_tokenizer(folder), folder, options)


@dataclass(frozen=True)
class Trial:
    """One seed: a training without a fifth of the molecules, and one on all.

    The fifth chooses.
    """

    pretrained: Pretrained
    options: Molecules
    seed: int
    unit: Unit

    def rows(self) -> Iterator[Row]:
        """Measure every method on the test molecules."""
        trained = TrainedTwice.by(
            self._trained, self.pretrained, "regression", self.seed
        )
        test = self.pretrained.data[TEST]

        # In units of the training targets, whose mean is 0 and whose deviation is 1.
        mean = known_exactly(torch.zeros(len(test), 1), noise=1.0)
        yield self._row("Mean of the training targets", mean)
        by_model = known_exactly(
            self._outputs(trained.final, test), self._noise_of(trained)
        )
        yield self._row("Trained model, constant noise", by_model)
        for name, with_head in POSTERIORS.items():
            say(self.options, f"Seed {self.seed}: {name}")
            la = trained.posterior(with_head)
            yield self._row(name, predicted_numbers(self.pretrained, la, test))
        say(self.options, f"Seed {self.seed}: Gaussian process")
        by_process = self._by_gaussian_process()
        yield self._row("Gaussian process on frozen features", by_process)

    def _noise_of(self, trained: TrainedTwice) -> float:
        """Find the deviation of the held-out targets from the first model's outputs.

        Training targets are fitted too closely to tell how large the noise is.
        """
        held = trained.split.held
        residuals = self._outputs(trained.first, held) - targets_of(held)
        return residuals.square().mean().sqrt().item()

    def _row(self, name: str, prediction: NumberPrediction) -> Row:
        """Measure predictions of the test molecules."""
        targets = targets_of(self.pretrained.data[TEST])
        figures = quality_of_numbers(prediction, targets)
        return {
            "name": name,
            "seed": self.seed,
            "unit": self.unit.std,
            **figures,
            "epistemic_std": prediction.epistemic_std.mean().item(),
            "total_std": prediction.total_std.mean().item(),
        }

    def _trained(self, records: Records) -> AdaptedModel:
        """Fine-tune LoRA weights and the head by least squares, or read them."""
        adapted = AdaptedModel(untrained(self.pretrained, self.seed))
        settings = self.pretrained.hyperparameters

        def loss_of(batch: Any) -> Tensor:
            outputs = adapted.logits_model(batch)
            return mse_loss(outputs[:, 0], batch["labels"])

        def trained() -> Checkpoints:
            return train(
                adapted.model,
                self.pretrained.shuffled_loader(records, self.seed),
                loss_of,
                settings,
                show_progress=not self.options.quiet,
                recipe=Recipe(),
            )

        # The loss is named: an equal training of classes would have the same key.
        key = ["least squares", asdict(settings), records, self.seed]
        read_or_train(adapted.model, key, self.options.cache, trained)
        return adapted

    def _outputs(
        self,
        model: AdaptedModel,
        records: Records,
    ) -> Tensor:
        return model.logits(self.pretrained.prediction_loader(records))

    def _by_gaussian_process(self) -> NumberPrediction:
        """Fit a Gaussian process to all training molecules."""
        train_records, test_records = (
            self.pretrained.data[TRAIN],
            self.pretrained.data[TEST],
        )
        return gaussian_process(
            frozen_features(self.pretrained, train_records),
            targets_of(train_records),
            frozen_features(self.pretrained, test_records),
            self.seed,
        )


def targets_of(records: Records) -> Tensor:
    """Collect standardised targets, `(N, 1)`."""
    return torch.tensor([[record["labels"]] for record in records])


def predicted_numbers(
    pretrained: Pretrained,
    la: LoRALaplace,
    records: Records,
) -> NumberPrediction:
    """Predict numbers by a posterior of a regression."""
    prediction = la.predict(pretrained.prediction_loader(records))
    assert isinstance(prediction, NumberPrediction)
    return prediction


def known_exactly(outputs: Tensor, noise: float) -> NumberPrediction:
    """Predict by outputs `(N, 1)` of no doubt, and a constant noise."""
    no_variance = torch.zeros_like(torch.diag_embed(outputs))
    return NumberPrediction.of([Moments(outputs, no_variance)], [noise])


def text_of(
    pretrained: Pretrained,
    rows: Sequence[Row],
) -> list[str]:
    """Put the figures in words and a table."""
    task = pretrained.task
    (of_what,) = task.classes
    # Each method of a seed has its unit: the first method's are one of each seed.
    first = rows[0]["name"]
    units = [row["unit"] for row in rows if row["name"] == first]
    words = (
        f"{task.name} ({of_what}): {len(task.train)} training and {len(task.test)} "
        f"test molecules for each of {len(units)} seeds; targets in standard "
        f"deviations of the training targets, {cell(sum(units) / len(units))} on "
        "average. A training without a fifth of the training molecules lets them "
        "choose noise and prior for the model that is trained on all; the Gaussian "
        "process has all, and chooses its kernel by the evidence. Mean ± standard "
        "deviation over seeds."
    )
    return [
        words,
        table(over_seeds(rows, ("name",), (*FIGURES, "epistemic_std", "total_std"))),
    ]
