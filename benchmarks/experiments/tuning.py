"""What choosing a prior precision costs, and what the choices are worth."""

import copy
import statistics as stdlib_statistics
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch.utils.data import DataLoader

from benchmarks.fine_tuning import fine_tune, prepare
from benchmarks.measuring import seconds_of
from benchmarks.methods import posterior
from benchmarks.methods.priors import geometric_mean
from benchmarks.metrics import quality
from benchmarks.models import AdaptedModel, by_length
from benchmarks.options import Tuning
from benchmarks.report import Figures, Row, provenance, table, write
from laplace_lora_ext import LinearizedModel, PredictiveStatistics, TuningHistory

PREDICTION_BATCH_SIZE = 8
REPETITIONS = 3
LINKS = ("probit", "mc", "mean_field")
LINEARIZED = ("linearized_marglik", "linearized_loo")
STRUCTURES = ("scalar", "layerwise")
COST_COLUMNS = (
    ("name", "What", ""),
    ("seconds", "Seconds", ".2f"),
    ("passes", "In prediction passes", ".2f"),
)
CHOICE_COLUMNS = (
    ("name", "Chosen by", ""),
    ("prior_precision", "Prior precision", ".3g"),
    *(
        (f"{link}_{key}", f"{title}, {link.replace('_', ' ')}", ".3f")
        for link in LINKS
        for key, title in (("nll", "NLL"), ("ece", "ECE"), ("accuracy", "Accuracy"))
    ),
)
KNOWN_WARNINGS = ("The posterior is over lora_A and lora_B", "By default `link_approx`")

Searches = list[tuple[str, dict[str, Any]]]


def run(options: Tuning) -> Figures:
    """Time the searches, measure their choices, and write tables, figures and plots."""
    for known in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=known)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    options.output.mkdir(parents=True, exist_ok=True)
    pretrained = prepare(options, options.seed, options.validation_examples)
    pretrained = pretrained.for_epochs(options.epochs)
    task = pretrained.task
    train, validation, test = (
        pretrained.records(examples) for examples in (task.train, task.validation, task.test)
    )
    model = fine_tune(pretrained, train, options.seed)
    loader = pretrained.loader(validation, PREDICTION_BATCH_SIZE)
    train_loader = pretrained.loader(train, pretrained.hyperparameters.batch_size)
    la = posterior("lowrank_kron").build(model)
    la.fit(train_loader, progress_bar=not options.quiet)
    seconds, statistics, linearized = _seconds(la, loader, train_loader, options)
    points = options.stock_grid_size
    stock = _stock_seconds(model, train_loader, pretrained.loader(validation, 1), options)
    seconds[f"Stock Kron, gridsearch of {points}"] = stock
    seconds[f"the same for {options.grid_size}, in proportion"] = stock * options.grid_size / points
    one_pass = next(iter(seconds.values()))
    costs = [
        {"name": name, "seconds": each, "passes": each / one_pass} for name, each in seconds.items()
    ]
    tested = la.predictive_statistics(pretrained.loader(by_length(test), PREDICTION_BATCH_SIZE))
    searches = _searches(statistics, linearized, options)
    choices, histories, shares = _choices(la, searches, tested, options)
    figures = {
        **provenance(options, pretrained.device),
        "data": {
            "task": task.name,
            "classes": list(task.classes),
            "train": len(train),
            "validation": len(validation),
            "test": len(test),
        },
        "statistics": repr(statistics),
        "costs": costs,
        "choices": choices,
        "variance_by_layer": shares,
    }
    _draw_histories(histories, options.output / "tuning.png")
    _draw_shares(shares, options.output / "variance_by_layer.png")
    report = [
        f"{len(validation)} validation texts, {len(task.classes)} classes, grid of "
        f"{options.grid_size}, {options.steps} steps of val_gd.\n{statistics!r}",
        table(costs, COST_COLUMNS),
        f"{len(test)} test texts; layerwise prior precisions as geometric means.",
        table(choices, CHOICE_COLUMNS),
    ]
    write(options.output, "tuning", figures, "\n\n".join(report))
    return figures


def _seconds(
    la: Any, loader: DataLoader, train_loader: DataLoader, options: Tuning
) -> tuple[dict[str, float], PredictiveStatistics, LinearizedModel]:
    """Time the searches, next to one prediction pass over the validation texts."""

    def predict() -> None:
        for batch in loader:
            la(batch, link_approx="probit")

    def search(**keywords: Any) -> float:
        return _median_seconds(lambda: la.optimize_prior_precision(**keywords))

    predict()  # the first pass also warms up
    seconds = {"One prediction pass": _median_seconds(predict)}
    statistics = la.predictive_statistics(loader)
    seconds["Predictive statistics, one pass"] = _median_seconds(
        lambda: la.predictive_statistics(loader)
    )
    linearized = la.linearize(train_loader)
    linearizing = _median_seconds(lambda: la.linearize(train_loader))
    grid = {"method": "gridsearch", "grid_size": options.grid_size}
    seconds["gridsearch, that pass included"] = search(val_loader=loader, **grid)
    seconds["gridsearch, statistics given"] = search(val_loader=statistics, **grid)
    texts = len(train_loader.dataset)  # pyright: ignore[reportArgumentType]
    seconds[f"Linearised model, one pass over {texts} training texts"] = linearizing
    for structure in STRUCTURES:
        prior: dict[str, Any] = {"prior_structure": structure}
        seconds[f"val_gd, {structure}, statistics given"] = search(
            method="val_gd", val_loader=statistics, n_steps=options.steps, **prior
        )
        seconds[f"marglik, {structure}"] = search(**prior)
        for method in LINEARIZED:
            seconds[f"{method}, {structure}, model given"] = search(
                method=method, train_loader=linearized, **prior
            )
    return seconds, statistics, linearized


def _stock_seconds(
    model: AdaptedModel, train_loader: DataLoader, loader: DataLoader, options: Tuning
) -> float:
    """Time the host's class, which predicts from one text at a time at the lowest cost."""
    own_copy = replace(model, model=copy.deepcopy(model.model))
    stock = posterior("stock_kron").build(own_copy)
    stock.fit(train_loader, progress_bar=not options.quiet)
    return seconds_of(
        lambda: stock.optimize_prior_precision(
            method="gridsearch",
            val_loader=loader,
            grid_size=options.stock_grid_size,
            link_approx="probit",
            progress_bar=not options.quiet,
        )
    )


def _searches(
    validation: PredictiveStatistics, linearized: LinearizedModel, options: Tuning
) -> Searches:
    """Every way of choosing, as keywords of `optimize_prior_precision`."""
    searches: Searches = [
        (f"marglik, {structure}", {"method": "marglik", "prior_structure": structure})
        for structure in STRUCTURES
    ]
    searches += [
        (
            f"{method}, {structure}",
            {"method": method, "prior_structure": structure, "train_loader": linearized},
        )
        for method in LINEARIZED
        for structure in STRUCTURES
    ]
    for link in LINKS:
        chosen = {"val_loader": validation, "link_approx": link}
        grid = {"method": "gridsearch", "n_samples": 1000, **chosen}
        descent = {"method": "val_gd", "n_samples": 100, "n_steps": options.steps, **chosen}
        searches.append((f"gridsearch, {link}", grid))
        searches += [
            (f"val_gd, {structure}, {link}", {**descent, "prior_structure": structure})
            for structure in STRUCTURES
        ]
    return searches


def _choices(
    la: Any, searches: Searches, test: PredictiveStatistics, options: Tuning
) -> tuple[list[Row], dict[str, TuningHistory], dict[str, float]]:
    """Measure what each way of choosing is worth on the test texts."""
    histories: dict[str, TuningHistory] = {}
    shares: dict[str, float] = {}
    rows: list[Row] = []
    assert test.targets is not None
    for name, search in searches:
        histories[name] = la.optimize_prior_precision(**search)
        if name == "marglik, layerwise":
            shares = la.variance_by_layer(test).by_block
        row: Row = {
            "name": name,
            "prior_precision": geometric_mean(la.prior_precision),
            "prior_precisions": la.prior_precision.tolist(),
            "objective": histories[name].objective.tolist(),
            "step": histories[name].step.tolist(),
        }
        moments = test.moments(la.prior_precision)
        for link in LINKS:
            probabilities = la(moments, link_approx=link, n_samples=options.samples)
            measured = quality(probabilities.cpu(), test.targets)
            row |= {f"{link}_{key}": value for key, value in measured.items()}
        rows.append(row)
    measured = quality(test.f_mu.softmax(-1), test.targets)
    without = {f"{link}_{key}": value for link in LINKS for key, value in measured.items()}
    return [*rows, {"name": "MAP", "prior_precision": None, **without}], histories, shares


def _median_seconds(job: Callable[[], object]) -> float:
    return stdlib_statistics.median(seconds_of(job) for _ in range(REPETITIONS))


def _draw_histories(histories: dict[str, TuningHistory], path: Path) -> None:
    """Draw the evidence, and the validation losses, along their searches."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    evidence, loss = figure.subplots(1, 2)
    for name, history in histories.items():
        if "marglik" in name:
            evidence.plot(history.step, history.objective, label=name)
        elif name.startswith("val_gd"):
            loss.plot(history.step, history.objective, label=name)
    evidence.set(xlabel="Step", ylabel="Log marginal likelihood, nats")
    loss.set(xlabel="Step", ylabel="Validation NLL, nats")
    for panel in (evidence, loss):
        panel.legend(frameon=False)
    figure.savefig(path, dpi=150)


def _draw_shares(by_block: dict[str, float], path: Path) -> None:
    """Draw each LoRA weight's share of the variance, A and B matrices side by side."""
    shares = pd.Series(by_block)
    names = shares.index.str.extract(r"(?:.*encoder\.)?(.*)\.(lora_[AB])")
    matrices = pd.DataFrame({"module": names[0], "matrix": names[1], "share": shares.values})
    figure = Figure(figsize=(8, 0.3 * len(matrices) / 2 + 1.5), layout="constrained")
    panel = figure.subplots()
    wide = matrices.pivot_table(index="module", columns="matrix", values="share", sort=False)
    wide.plot.barh(ax=panel, width=0.8)
    panel.invert_yaxis()
    panel.set(xlabel="Share of the variance of the test texts' logits", ylabel="")
    panel.legend(frameon=False)
    figure.savefig(path, dpi=150)
