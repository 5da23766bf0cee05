"""What choosing a prior precision costs, and what the choices are worth."""

import copy
import statistics as stdlib_statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from torch.utils.data import DataLoader

from benchmarks.fine_tuning import PREDICTION_BATCH_SIZE, TEST, fine_tune, prepare
from benchmarks.measuring import seconds_of, set_up
from benchmarks.methods import posterior
from benchmarks.methods.priors import geometric_mean
from benchmarks.metrics import quality
from benchmarks.models import AdaptedModel
from benchmarks.options import Tuning
from benchmarks.report import Figures, Row, provenance, save, table, write
from laplace_lora_ext import LinearizedModel, PredictiveStatistics, TuningHistory

REPETITIONS = 3
LINKS = ("probit", "mc", "mean_field")
LINEARIZED = ("linearized_marglik", "linearized_loo")
STRUCTURES = ("scalar", "layerwise")


def run(options: Tuning) -> Figures:
    """Time the searches, measure their choices, and write tables, figures and plots."""
    set_up(options)
    pretrained = prepare(options, options.seed, options.validation_examples)
    pretrained = pretrained.for_epochs(options.epochs)
    model = fine_tune(pretrained, pretrained.data["train"], options.seed)
    loader = pretrained.loader("validation", PREDICTION_BATCH_SIZE)
    train_loader = pretrained.loader("train")
    la = posterior("lowrank_kron").build(model)
    la.fit(train_loader, progress_bar=not options.quiet)
    seconds, statistics, linearized = _seconds(la, loader, train_loader, options)
    points = options.stock_grid_size
    stock = _stock_seconds(model, train_loader, pretrained.loader("validation", 1), options)
    seconds[f"Stock Kron, gridsearch of {points}"] = stock
    seconds[f"the same for {options.grid_size}, in proportion"] = stock * options.grid_size / points
    one_pass = next(iter(seconds.values()))
    costs = [
        {"name": name, "seconds": each, "passes": each / one_pass} for name, each in seconds.items()
    ]
    test = la.predictive_statistics(pretrained.loader(TEST, PREDICTION_BATCH_SIZE))
    searches = _searches(statistics, linearized, options)
    choices, histories, shares = _choices(la, searches, test, options)
    figures = {
        **provenance(options, pretrained.device),
        "data": pretrained.description,
        "statistics": repr(statistics),
        "costs": costs,
        "choices": choices,
        "variance_by_layer": shares,
    }
    measured = [f"{link}_{key}" for link in LINKS for key in ("nll", "ece", "accuracy")]
    report = [
        f"{len(statistics)} validation texts, {len(pretrained.task.classes)} classes, grid of "
        f"{options.grid_size}, {options.steps} steps of val_gd.\n{statistics!r}",
        table(costs, ["name", "seconds", "passes"], {"passes": "In prediction passes"}),
        f"{len(test)} test texts; layerwise prior precisions as geometric means.",
        table(choices, ["name", "prior_precision", *measured], {"name": "Chosen by"}),
    ]
    write(options.output, "tuning", figures, "\n\n".join(report))
    _draw_histories(histories, options.output / "tuning.png")
    _draw_shares(shares, options.output / "variance_by_layer.png")
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
    passing = _median_seconds(lambda: la.predictive_statistics(loader))
    seconds["Predictive statistics, one pass"] = passing
    linearized = la.linearize(train_loader)
    linearizing = _median_seconds(lambda: la.linearize(train_loader))
    grid = {"method": "gridsearch", "grid_size": options.grid_size}
    seconds["gridsearch, that pass included"] = search(val_loader=loader, **grid)
    seconds["gridsearch, statistics given"] = search(val_loader=statistics, **grid)
    texts: Any = train_loader.dataset
    seconds[f"Linearised model, one pass over {len(texts)} training texts"] = linearizing
    for structure in STRUCTURES:
        prior: dict[str, Any] = {"prior_structure": structure}
        descent = {"method": "val_gd", "val_loader": statistics, "n_steps": options.steps}
        seconds[f"val_gd, {structure}, statistics given"] = search(**descent, **prior)
        seconds[f"marglik, {structure}"] = search(**prior)
        for method in LINEARIZED:
            found = search(method=method, train_loader=linearized, **prior)
            seconds[f"{method}, {structure}, model given"] = found
    return seconds, statistics, linearized


def _stock_seconds(
    model: AdaptedModel, train_loader: DataLoader, loader: DataLoader, options: Tuning
) -> float:
    """Time the host's class, which predicts from one text at a time at the lowest cost."""
    stock = posterior("stock_kron").build(replace(model, model=copy.deepcopy(model.model)))
    stock.fit(train_loader, progress_bar=not options.quiet)
    grid = {"method": "gridsearch", "grid_size": options.stock_grid_size}
    keywords = {"val_loader": loader, "link_approx": "probit", "progress_bar": not options.quiet}
    return seconds_of(lambda: stock.optimize_prior_precision(**grid, **keywords))


def _searches(
    validation: PredictiveStatistics, linearized: LinearizedModel, options: Tuning
) -> dict[str, dict[str, Any]]:
    """Every way of choosing, as keywords of `optimize_prior_precision`."""
    priors = {structure: {"prior_structure": structure} for structure in STRUCTURES}
    searches = {f"marglik, {name}": {"method": "marglik", **p} for name, p in priors.items()}
    for method in LINEARIZED:
        for name, prior in priors.items():
            search = {"method": method, "train_loader": linearized, **prior}
            searches[f"{method}, {name}"] = search
    for link in LINKS:
        data = {"val_loader": validation, "link_approx": link}
        searches[f"gridsearch, {link}"] = {"method": "gridsearch", "n_samples": 1000, **data}
        descent = {"method": "val_gd", "n_samples": 100, "n_steps": options.steps, **data}
        searches |= {f"val_gd, {name}, {link}": {**descent, **p} for name, p in priors.items()}
    return searches


def _choices(
    la: Any, searches: dict[str, dict[str, Any]], test: PredictiveStatistics, options: Tuning
) -> tuple[list[Row], dict[str, TuningHistory], dict[str, float]]:
    """Measure what each way of choosing is worth on the test texts."""
    histories: dict[str, TuningHistory] = {}
    shares: dict[str, float] = {}
    rows: list[Row] = []
    assert test.targets is not None
    for name, search in searches.items():
        history = histories[name] = la.optimize_prior_precision(**search)
        if name == "marglik, layerwise":
            shares = la.variance_by_layer(test).by_block
        row: Row = {
            "name": name,
            "prior_precision": geometric_mean(la.prior_precision),
            "prior_precisions": la.prior_precision.tolist(),
            "objective": history.objective.tolist(),
            "step": history.step.tolist(),
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
    panels = figure.subplots(1, 2)
    for panel, kind, title in zip(
        panels,
        ("marglik", "val_gd"),
        ("Log marginal likelihood, nats", "Validation NLL, nats"),
        strict=True,
    ):
        for name, history in histories.items():
            if kind in name:
                panel.plot(history.step, history.objective, label=name)
        panel.set(xlabel="Step", ylabel=title)
        panel.legend(frameon=False)
    save(figure, path)


def _draw_shares(by_block: dict[str, float], path: Path) -> None:
    """Draw each LoRA weight's share of the variance, A and B matrices side by side."""
    names = pd.Series(list(by_block)).str.extract(r"(?:.*encoder\.)?(.*)\.(lora_[AB])")
    shares = names.set_axis(["module", "matrix"], axis=1).assign(share=by_block.values())
    wide = shares.pivot_table("share", "module", "matrix", sort=False)
    figure = Figure(figsize=(8, 0.3 * len(wide) + 1.5), layout="constrained")
    panel = figure.subplots()
    wide.plot.barh(ax=panel, width=0.8)
    panel.invert_yaxis()
    panel.set(xlabel="Share of the variance of the test texts' logits", ylabel="")
    save(figure, path)
