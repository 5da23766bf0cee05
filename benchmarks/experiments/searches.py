"""Which numbers of the search are best, where stages train on after it has chosen."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from benchmarks.experiments.few import held_of, with_classes
from benchmarks.experiments.stages import FIRST_STAGE, Trial
from benchmarks.fine_tuning import TEST, TRAIN, labels_of, prepare, untrained
from benchmarks.methods.members import Member, Posteriors
from benchmarks.options import Searches
from benchmarks.report import Frame, Result, Row, as_frame, records, say, table
from laplace_lora_ext.metrics import quality
from laplace_lora_ext.training.stages import SECOND_STAGE, choose_priors
from laplace_lora_ext.tuning import gridsearch

OURS = "as it is"
# Numbers of `gridsearch`, one of them changed at a time: `patch` wants one at least.
SEARCHES: dict[str, dict[str, Any]] = {
    OURS: {"USUAL_PRIOR": gridsearch.USUAL_PRIOR},
    "usual prior 100": {"USUAL_PRIOR": 100.0},
    "usual prior 1,000": {"USUAL_PRIOR": 1000.0},
    "one decade": {"DECADES": 1.0},
    "two decades": {"DECADES": 2.0},
    "a flat prior": {"DECADES": 1e6},
    "no penalty below 1": {"PENALTIES": (0.0, 4.0)},
    "a penalty of 1 below 1": {"PENALTIES": (1.0, 4.0)},
    "a penalty of 2 above 1": {"PENALTIES": (0.25, 2.0)},
    "a penalty of 8 above 1": {"PENALTIES": (0.25, 8.0)},
    "one nat": {"LEAST_GAIN": 1.0},
    "four nats": {"LEAST_GAIN": 4.0},
}
LEARNT = -1  # seed of the texts that the second stage adds; draws are from 0 on
MEASURES = ("nll", "ece", "brier")


def run(options: Searches) -> Iterator[Result]:
    """Measure each task and seed."""
    rows: list[Row] = []
    for name in options.tasks:
        for seed in options.seeds:
            rows += measured(replace(options, task=name), seed)
            yield {"rows": rows}, text_of(rows)


def measured(options: Searches, seed: int) -> Iterator[Row]:
    """Train both stages, and let draws of other texts choose by each search.

    Texts of the test set are of three kinds: the second stage learns some, some choose,
    and all others judge.
    """
    n_classes = len(prepare(options, seed).task.classes)
    asked = replace(options, train_examples=n_classes * options.texts)
    pretrained = prepare(asked, seed)
    task = with_classes(pretrained.task, options.classes)
    pretrained = replace(pretrained, task=task)
    trial = Trial(pretrained, asked, seed)
    test = pretrained.data[TEST]
    labels = labels_of(test)
    is_learnt = held_of(labels, options.held, LEARNT)
    model = untrained(pretrained, seed)

    def stage(texts: list[Any], share: float) -> Member:
        trial.train(model, texts, share, 0)
        return trial.fitted(model, texts, {TEST: pretrained.prediction_loader(test)})

    training = list(pretrained.data[TRAIN])
    first = stage(training, FIRST_STAGE)
    # The second stage changes the weights that the first posterior is around.
    choices = []
    for draw in range(options.draws):
        say(options, f"{options.task}, seed {seed}: draw {draw}")
        drawn = held_of(labels.masked_fill(is_learnt, -1), options.held, draw)
        is_held = drawn & ~is_learnt
        for search, numbers in SEARCHES.items():
            with patch.multiple(gridsearch, **numbers):
                chosen, _ = choose_priors([first.la], first.statistics[TEST][is_held])
            choices.append((draw, search, is_held, chosen))
    learnt = [test[place] for place in is_learnt.nonzero().flatten().tolist()]
    second = stage([*training, *learnt], SECOND_STAGE)
    for draw, search, is_held, chosen in choices:
        probabilities = Posteriors([second], chosen).probabilities(TEST)
        is_other = ~(is_held | is_learnt)
        identity = {"task": options.task, "seed": seed, "draw": draw, "search": search}
        yield identity | quality(probabilities[is_other], labels[is_other])


def text_of(rows: list[Row]) -> list[str]:
    """Put means of the tasks in a table, beside differences to the search as it is."""
    frame = as_frame(rows)
    by_task = frame.groupby(["search", "task"], sort=False)[list(MEASURES)].mean()
    shown: Frame = by_task.groupby("search", sort=False).mean()
    apart = by_task - by_task.loc[OURS]
    words = (
        f"{', '.join(frame['task'].unique())}: means of the tasks, less those of the "
        "search as it is, and standard errors over tasks."
    )
    for measure in MEASURES:
        of_tasks = apart[measure].groupby("search", sort=False)
        shown[f"{measure}_difference"] = of_tasks.mean()
        shown[f"{measure}_error"] = of_tasks.sem()
    return [words, table(records(shown.reset_index()))]
