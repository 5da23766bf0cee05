"""What few labelled texts choose: a temperature, or a prior precision and a scale."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.fine_tuning import (
    TEST,
    TRAIN,
    Pretrained,
    fine_tune,
    labels_of,
    prepare,
)
from benchmarks.methods.method import fit_temperature
from benchmarks.methods.posteriors import LINK, lowrank_kron, probabilities
from benchmarks.options import Few
from benchmarks.report import Result, Row, over_seeds, say, table
from benchmarks.tasks.task import Example, Task
from laplace_lora_ext import LowRankKronLoRALaplace
from laplace_lora_ext.metrics import negative_log_likelihood
from laplace_lora_ext.predictive.statistics import PredictiveStatistics

WORST = 0.05  # of the draws


def run(options: Few) -> Iterator[Result]:
    """Measure each seed."""
    rows: list[Row] = []
    for seed in options.seeds:
        pretrained = prepare(options, seed)
        task = with_classes(pretrained.task, options.classes)
        pretrained = replace(pretrained, task=task)
        for row in measured(pretrained, options, seed):
            rows.append({"seed": seed, **row})
            yield {**pretrained.figures, "rows": rows}, text_of(pretrained, rows)


def with_classes(task: Task, numbers: Sequence[int]) -> Task:
    """Leave the classes of these numbers, or all if there are none."""
    if not numbers:
        return task

    def kept(examples: Sequence[Example]) -> list[Example]:
        return [
            example._replace(label=numbers.index(example.label))
            for example in examples
            if example.label in numbers
        ]

    return replace(
        task,
        classes=[task.classes[number] for number in numbers],
        train=kept(task.train),
        test=kept(task.test),
        shifted={},
    )


def measured(pretrained: Pretrained, options: Few, seed: int) -> Iterator[Row]:
    """Train once, and let draws of the test texts choose for all others."""
    records = pretrained.data[TRAIN]
    model = fine_tune(pretrained, records, seed)
    la = lowrank_kron(model)
    la.fit(pretrained.loader(records))
    test = pretrained.data[TEST]
    statistics = la.predictive_statistics(pretrained.prediction_loader(test))
    labels = labels_of(test)
    of_all = la.optimize_prior_precision(method="gridsearch", val_loader=statistics)
    for of_class in options.held:
        say(options, f"Seed {seed}: {of_class} texts a class")
        drawn = [held_of(labels, of_class, draw) for draw in range(options.draws)]
        found = [losses(la, statistics, labels, is_held) for is_held in drawn]
        temperature, posterior = zip(*found, strict=True)
        yield {
            "held_out": int(drawn[0].sum()),
            "temperature": fmean(temperature),
            "posterior": fmean(posterior),
            "worst_temperature": worst_of(temperature),
            "worst_posterior": worst_of(posterior),
            "ahead": fmean(of_p < of_t for of_t, of_p in found),
            "best": of_all.loss,
        }


def held_of(labels: Tensor, of_class: int, seed: int) -> Tensor:
    """Mark so many texts of each class, drawn at random: `(N,)` booleans."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    is_held = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        is_held[order[labels[order] == label][:of_class]] = True
    return is_held


def losses(
    la: LowRankKronLoRALaplace,
    statistics: PredictiveStatistics,
    labels: Tensor,
    is_held: Tensor,
) -> tuple[float, float]:
    """Return the NLL of all other texts by what these choose, both ways."""
    f_mu, others = statistics.f_mu, labels[~is_held]
    temperature = fit_temperature(f_mu[is_held], labels[is_held])
    tempered = cross_entropy(f_mu[~is_held] / temperature, others).item()
    la.optimize_prior_precision(method="gridsearch", val_loader=statistics[is_held])
    moments = statistics[~is_held].moments(la.prior_precision)
    return tempered, negative_log_likelihood(probabilities(la, moments, LINK), others)


def worst_of(found: Sequence[float]) -> float:
    """Average the highest twentieth."""
    return fmean(sorted(found)[-math.ceil(WORST * len(found)) :])


def text_of(pretrained: Pretrained, rows: list[Row]) -> list[str]:
    """Put the figures in words and a table."""
    task = pretrained.task
    words = (
        f"{task.name}: {len(task.classes)} classes, {len(task.train)} training texts. "
        "Texts held out of the test set choose a temperature, or the posterior's prior "
        "precision and scale; NLL of the others, in the mean of draws and of the worst "
        f"{WORST:.0%}, and in how many the posterior is ahead. Best is what all "
        f"{len(task.test)} test texts choose for themselves."
    )
    figures = [key for key in rows[0] if key not in ("seed", "held_out")]
    return [words, table(over_seeds(rows, ["held_out"], figures))]
