"""Methods that need no held-out texts on models fine-tuned with several seeds."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

from torch.utils.benchmark import timer

from benchmarks import metrics, report
from benchmarks.fine_tuning import PREDICTION_BATCH_SIZE, TEST, Pretrained, fine_tune, prepare
from benchmarks.measuring import Clock, repeated_seconds
from benchmarks.methods import METHODS, priors
from benchmarks.methods.method import PointMethod, Posterior, Probabilities, labels_of
from benchmarks.methods.priors import NO_PRIOR, Prior
from benchmarks.options import Calibration
from benchmarks.report import Figures, Result, Row, say
from laplace_lora_ext.metrics import quality

CONTESTANTS = (
    *("map", "mc_dropout", "checkpoint_ensemble", "deep_ensemble", "tfb", "blob", "ivon"),
    *("last_layer", "diag", "kron", "lowrank_kron_paper", "lowrank_kron"),
)
FIGURES = ("accuracy", "nll", "ece", "regret", "chosen")
COSTS = ("forward_passes", "fit_seconds", "predict_seconds")
TIMED_BATCHES = 4  # of predictions
REPETITIONS = 3


def run(options: Calibration) -> Iterator[Result]:
    """Measure each seed, and report after it, so that a run of hours may be cut off."""
    keys = chosen_methods(options.methods)
    rows: list[Row] = []
    for seed in options.seeds:
        pretrained = prepare(options, seed)
        rows += measured(pretrained, seed, keys)
        yield figures_of(pretrained, rows), text_of(pretrained, rows, (*FIGURES, *COSTS))


def chosen_methods(names: Collection[str] | None) -> list[str]:
    """Keys of MAP and the methods asked for by key or title; all of them by default."""
    titles = {key: METHODS[key].title for key in CONTESTANTS}
    asked = set(names or CONTESTANTS)
    if unknown := asked - {*titles.keys(), *titles.values()}:
        listed = ", ".join(f"{key} ({title})" for key, title in titles.items())
        raise SystemExit(f"No method is called {unknown.pop()!r}; known are: {listed}.")
    return [key for key, title in titles.items() if {"map", *asked} & {key, title}]


def measured(pretrained: Pretrained, seed: int, keys: Collection[str]) -> Iterator[Row]:
    """Fine-tune, and measure methods with these keys: a row for each, and each prior and link."""
    tests, options = Tests(pretrained, seed), pretrained.options
    model = fine_tune(pretrained, pretrained.data["train"], seed)
    train, bare = pretrained.loader("train", PREDICTION_BATCH_SIZE), 0.0
    for method in (METHODS[key] for key in keys):
        say(options, f"Seed {seed}: {method.title}")
        started = timer()
        if isinstance(method, PointMethod):
            members = method.fit(model, train)
            fit_seconds, started = timer() - started, timer()
            found = members.predict({TEST: tests.loaders[TEST]})
            predict_seconds = timer() - started
            bare = bare or predict_seconds  # MAP is the first
            costs: Any = {"fit_seconds": fit_seconds, "predict_seconds": predict_seconds}
            costs["forward_passes"] = predict_seconds / bare
            shifted = {name: tests.loaders[name] for name in pretrained.task.shifted}
            yield tests.row(method.key, method.title, found | members.predict(shifted), **costs)
        elif isinstance(method, Posterior):
            la = method.build(model)
            la.fit(pretrained.loader("train"), progress_bar=not options.quiet)
            seconds: dict[str, Any] = {"fit_seconds": timer() - started}
            seconds["predict_seconds"] = tests.seconds(lambda x, la=la: la(x, link_approx="probit"))
            seconds["forward_passes"] = seconds["predict_seconds"] / bare
            data = train if method.on_training else None
            for found in priors.predictions(la, data, tests.loaders):
                yield tests.row(method.key, method.title, **found, **seconds)


class Tests:
    """The texts that one seed is measured on: makes rows of predictions."""

    def __init__(self, pretrained: Pretrained, seed: int) -> None:
        self.seed, names = seed, (TEST, *pretrained.task.shifted)
        self.loaders = {name: pretrained.loader(name, PREDICTION_BATCH_SIZE) for name in names}
        self.labels = {name: labels_of(loader) for name, loader in self.loaders.items()}

    def seconds(self, predict: Callable[[Any], object], clock: Clock = timer) -> float:
        """Time to predict all test texts, from some of their batches."""
        batches = list(islice(self.loaders[TEST], TIMED_BATCHES))
        taken = repeated_seconds(lambda: [*map(predict, batches)], REPETITIONS, clock=clock)
        return taken["minimum"] * len(self.loaders[TEST]) / len(batches)

    def row(
        self,
        method: str,
        name: str,
        probabilities: Probabilities,
        *,
        prior: Prior = NO_PRIOR,
        link: str = "",
        **figures: float | None,
    ) -> Row:
        """Measure probabilities of the test texts and each shifted set."""
        test, labels = probabilities[TEST], self.labels[TEST]
        row: Row = {
            **{"seed": self.seed, "method": method, "name": name},
            **{"prior": prior.key, "chosen_by": prior.title, "link": link},
            **{"chosen": None, "regret": None, **figures},
            **quality(test, labels),
            "reliability": metrics.reliability(test, labels),
            "shifted": {},
        }
        for name in (name for name in probabilities if name != TEST):
            shifted, classes = probabilities[name], self.labels[name]
            row["shifted"][name] = {
                **(quality(shifted, classes) if bool((classes >= 0).all()) else {}),
                **metrics.shift_detection(test, shifted),
            }
        return row


def figures_of(pretrained: Pretrained, rows: list[Row]) -> Figures:
    """Rows with what they were measured on."""
    settings = asdict(pretrained.hyperparameters)
    return {"task": pretrained.description, "hyperparameters": settings, "methods": rows}


def text_of(pretrained: Pretrained, rows: list[Row], figures: Collection[str]) -> list[str]:
    """Rows of several seeds in words and a table."""
    task = pretrained.description
    seeds = sorted({row["seed"] for row in rows})
    aurocs = {f"AUROC of {name}": name for name in task["shifted"]}
    for title, name in aurocs.items():
        rows = [{**row, title: row["shifted"][name]["shift_auroc"]} for row in rows]
    return [
        f"Task {task['name']}: {pretrained.hyperparameters.model} with LoRA, {task['train']} "
        f"training texts, {task['test']} test texts, {len(task['classes'])} classes; shifted "
        f"texts: {report.counts(task['shifted'])}. Seeds: {', '.join(map(str, seeds))}; mean "
        "± standard deviation of several.",
        report.table(report.over_seeds(rows, ["name", "chosen_by", "link"], [*figures, *aurocs])),
    ]
