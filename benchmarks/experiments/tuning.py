"""What choosing a prior precision costs, and what the choices are worth."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from torch.utils.data import DataLoader

from benchmarks.fine_tuning import PREDICTION_BATCH_SIZE, TEST, fine_tune, prepare
from benchmarks.measuring import seconds_of, set_up
from benchmarks.methods import posterior
from benchmarks.methods.priors import PRIORS
from benchmarks.models import AdaptedModel
from benchmarks.options import Tuning
from benchmarks.report import Figures, Row, provenance, save, table, write
from laplace_lora_ext import LinearizedModel, PredictiveStatistics, TuningHistory
from laplace_lora_ext.metrics import quality

REPETITIONS = 3
LINKS = ("probit", "mc", "mean_field")


def run(options: Tuning) -> Figures:
    """Time the searches, measure their choices, and write tables, figures and plots."""
    set_up(options)
    pretrained = prepare(options, options.seed, options.validation_examples)
    pretrained = pretrained.for_epochs(options.epochs)
    model = fine_tune(pretrained, pretrained.data["train"], options.seed)
    train = pretrained.loader("train")
    validation = pretrained.loader("validation", PREDICTION_BATCH_SIZE)
    la = posterior("lowrank_kron").build(model)
    la.fit(train, progress_bar=not options.quiet)
    seconds: dict[str, float] = {}

    def timed(name: str, job: Callable[[], object]) -> None:
        seconds[name] = median(seconds_of(job) for _ in range(REPETITIONS))

    def predict() -> None:
        for batch in validation:
            la(batch, link_approx="probit")

    predict()  # the first pass also warms up
    timed("One prediction pass", predict)
    statistics = la.predictive_statistics(validation)
    timed("Predictive statistics, one pass", lambda: la.predictive_statistics(validation))
    linearized = la.linearize(train)
    timed("Linearised model, one pass over the training texts", lambda: la.linearize(train))
    searches = _searches(statistics, linearized, options)
    grid = searches["gridsearch, probit"] | {"val_loader": validation}
    timed("gridsearch, that pass included", lambda: la.optimize_prior_precision(**grid))
    test = la.predictive_statistics(pretrained.loader(TEST, PREDICTION_BATCH_SIZE))
    choices, histories, shares = _choices(la, searches, test, options)
    for name in (name for name in searches if not name.endswith(LINKS[1:])):
        timed(name, lambda name=name: la.optimize_prior_precision(**searches[name]))
    points, size = options.stock_grid_size, options.grid_size
    grid |= {"val_loader": pretrained.loader("validation", 1), "grid_size": points}
    taken = _stock_seconds(model, train, grid)
    seconds[f"Stock Kron, gridsearch of {points}"] = taken
    seconds[f"the same for {size}, in proportion"] = taken * size / points
    one_pass = seconds["One prediction pass"]
    costs = [{"name": key, "seconds": x, "passes": x / one_pass} for key, x in seconds.items()]
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
        f"{len(statistics)} validation texts, grid of {options.grid_size}, {options.steps} steps of"
        f" val_gd; searches have statistics or the linearised model given.\n{statistics!r}",
        table(costs, ["name", "seconds", "passes"]),
        f"{len(test)} test texts; layerwise prior precisions as geometric means.",
        table(choices, ["name", "prior_precision", *measured]),
    ]
    write(options.output, "tuning", figures, "\n\n".join(report))
    _draw_histories(histories, options.output / "tuning.png")
    _draw_shares(shares, options.output / "variance_by_layer.png")
    return figures


def _stock_seconds(model: AdaptedModel, train: DataLoader, grid: dict[str, Any]) -> float:
    """Time the host's class, which predicts from one text at a time at the lowest cost."""
    stock = posterior("stock_kron").build(replace(model, model=copy.deepcopy(model.model)))
    stock.fit(train)
    return seconds_of(lambda: stock.optimize_prior_precision(**grid))


def _searches(
    validation: PredictiveStatistics, linearized: LinearizedModel, options: Tuning
) -> dict[str, dict[str, Any]]:
    """Every way of choosing, as keywords of `optimize_prior_precision`."""
    searches: dict[str, dict[str, Any]] = {
        f"marglik, {name}": {"method": "marglik", **prior} for name, prior in PRIORS.items()
    }
    for method in ("linearized_marglik", "linearized_loo"):
        search = {"method": method, "train_loader": linearized}
        searches |= {f"{method}, {name}": search | prior for name, prior in PRIORS.items()}
    for link in LINKS:
        data = {"val_loader": validation, "link_approx": link}
        grid = {"method": "gridsearch", "grid_size": options.grid_size, "n_samples": 1000}
        descent = {"method": "val_gd", "n_steps": options.steps, "n_samples": 100}
        searches[f"gridsearch, {link}"] = grid | data
        for name, prior in PRIORS.items():
            searches[f"val_gd, {name}, {link}"] = descent | data | prior
    return searches


def _choices(
    la: Any, searches: dict[str, dict[str, Any]], test: PredictiveStatistics, options: Tuning
) -> tuple[list[Row], dict[str, TuningHistory], dict[str, float]]:
    """Measure what each way of choosing is worth on the test texts."""
    histories, shares, rows = {}, {}, []
    labels: Any = test.targets
    for name, search in searches.items():
        history = histories[name] = la.optimize_prior_precision(**search)
        if name == "marglik, layerwise":
            shares = la.variance_by_layer(test).by_block
        row: Row = {
            "name": name,
            "prior_precision": la.prior_precision.log().mean().exp().item(),
            "prior_precisions": la.prior_precision.tolist(),
            "objective": history.objective.tolist(),
            "step": history.step.tolist(),
        }
        moments = test.moments(la.prior_precision)
        for link in LINKS:
            probabilities = la(moments, link_approx=link, n_samples=options.samples)
            measured = quality(probabilities.cpu(), labels)
            row |= {f"{link}_{key}": value for key, value in measured.items()}
        rows.append(row)
    measured = quality(test.f_mu.softmax(-1), labels)
    without = {f"{link}_{key}": value for link in LINKS for key, value in measured.items()}
    return [*rows, {"name": "MAP", "prior_precision": None, **without}], histories, shares


def _draw_histories(histories: dict[str, TuningHistory], path: Path) -> None:
    """Draw the evidence, and the validation losses, along their searches."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = dict(zip(("marglik", "val_gd"), figure.subplots(1, 2), strict=True))
    for kind, panel in panels.items():
        for name, history in histories.items():
            if kind in name:
                panel.plot(history.step, history.objective, label=name)
        panel.set(xlabel="Step", ylabel=f"Objective of {kind}, nats")
        panel.legend(frameon=False)
    save(figure, path)


def _draw_shares(by_block: dict[str, float], path: Path) -> None:
    """Draw each LoRA weight's share of the variance, A and B matrices side by side."""
    names = pd.Series(list(by_block)).str.extract(r"(?:.*encoder\.)?(.*)\.(lora_[AB])")
    shares = names.set_axis(["module", "matrix"], axis=1).assign(share=by_block.values())
    wide = shares.pivot_table("share", "module", "matrix", sort=False)
    figure = Figure(figsize=(8, 0.3 * len(wide) + 1.5), layout="constrained")
    panel = figure.subplots()
    wide.plot.barh(ax=panel, width=0.8, ylabel="", xlabel="Share of the test logits' variance")
    panel.invert_yaxis()
    save(figure, path)
