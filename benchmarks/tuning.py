"""What choosing a prior precision costs, and what the choices are worth."""

import argparse
import statistics as stdlib_statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from laplace import Laplace
from matplotlib.figure import Figure
from torch.utils.data import DataLoader

from benchmarks.contestants import PREDICTION_BATCH_SIZE
from benchmarks.docstrings import LIBRARIES
from benchmarks.metrics import quality
from benchmarks.minilm import load_fine_tuned
from benchmarks.preparation import Prepared, prepare
from benchmarks.report import (
    describe_machine,
    markdown_table,
    package_versions,
    settings_of,
    write_figures,
)
from laplace_lora_ext import LinearizedModel, PredictiveStatistics, TuningHistory
from laplace_lora_ext.models.logits_model import LogitsModel

REPETITIONS = 3
LINKS = ("probit", "mc", "mean_field")
LINEARIZED = ("linearized_marglik", "linearized_loo")
STRUCTURES = ("scalar", "layerwise")
COST_COLUMNS = (
    ("name", "What", "{}"),
    ("seconds", "Seconds", "{:.2f}"),
    ("passes", "In prediction passes", "{:.2f}"),
)
CHOICE_COLUMNS = (
    ("name", "Chosen by", "{}"),
    ("prior_precision", "Prior precision", "{}"),
    *(
        (f"{link}_{key}", f"{title}, {link.replace('_', ' ')}", "{:.3f}")
        for link in LINKS
        for key, title in (("nll", "NLL"), ("ece", "ECE"), ("accuracy", "Accuracy"))
    ),
)


def tune(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark of tuning.

    Parameters
    ----------
    arguments : argparse.Namespace
        Options of the command line.

    Returns
    -------
    figures : dict
        Everything that was measured, as in tuning.json.
    """
    warnings.filterwarnings("ignore", message="The posterior is over lora_A and lora_B")
    warnings.filterwarnings("ignore", message="By default `link_approx`")
    prepared = prepare(arguments)
    transformers.set_seed(arguments.seed)
    loader = prepared.loader(prepared.validation, PREDICTION_BATCH_SIZE)
    la: Any = Laplace(prepared.model, "classification", "lora", "lowrank_kron")
    train_loader = prepared.loader(prepared.train, arguments.batch_size)
    la.fit(train_loader, progress_bar=not arguments.quiet)
    costs, statistics, linearized = _costs(la, loader, train_loader, arguments, prepared)
    test = la.predictive_statistics(prepared.loader(prepared.test, PREDICTION_BATCH_SIZE))
    choices, histories, shares = _choices(la, statistics, linearized, test, arguments)
    figures = {
        "settings": settings_of(arguments),
        "data": {
            "classes": list(LIBRARIES),
            "train": len(prepared.train),
            "validation": len(prepared.validation),
            "test": len(prepared.test),
        },
        "statistics": repr(statistics),
        "costs": costs,
        "choices": choices,
        "variance_by_layer": shares,
        "machine": {"device": prepared.device, **describe_machine(prepared.device)},
        "versions": package_versions(),
    }
    report = "\n\n".join(
        [
            f"{len(prepared.validation)} validation texts, {len(LIBRARIES)} classes, grid of "
            f"{arguments.grid_size}, {arguments.steps} steps of val_gd.\n{statistics!r}",
            markdown_table(costs, COST_COLUMNS),
            f"{len(prepared.test)} test texts; layerwise prior precisions as geometric means.",
            markdown_table(choices, CHOICE_COLUMNS),
        ]
    )
    (arguments.output / "tuning.md").write_text(report + "\n", encoding="utf-8")
    _draw_histories(histories, arguments.output / "tuning.png")
    _draw_shares(shares, arguments.output / "variance_by_layer.png")
    write_figures(figures, arguments.output / "tuning.json")
    print(report)
    return figures


def _costs(
    la: Any,
    loader: DataLoader,
    train_loader: DataLoader,
    arguments: argparse.Namespace,
    prepared: Prepared,
) -> tuple[list[dict[str, Any]], PredictiveStatistics, LinearizedModel]:
    """Time the searches, next to one prediction pass over the validation texts."""

    def predict() -> None:
        for batch in loader:
            la(batch, link_approx="probit")

    def search(val_loader: Any) -> None:
        la.optimize_prior_precision(
            method="gridsearch", val_loader=val_loader, grid_size=arguments.grid_size
        )

    predict()  # the first pass also warms up
    one_pass = _seconds(predict)
    statistics = la.predictive_statistics(loader)
    gathering = _seconds(lambda: la.predictive_statistics(loader))
    linearized = la.linearize(train_loader)
    linearizing = _seconds(lambda: la.linearize(train_loader))
    rows = [
        ("One prediction pass", one_pass),
        ("Predictive statistics, one pass", gathering),
        ("gridsearch, that pass included", _seconds(lambda: search(loader))),
        ("gridsearch, statistics given", _seconds(lambda: search(statistics))),
        (f"Linearised model, one pass over {len(prepared.train)} training texts", linearizing),
    ]
    for structure in STRUCTURES:
        seconds = _seconds(
            lambda structure=structure: la.optimize_prior_precision(
                method="val_gd",
                val_loader=statistics,
                prior_structure=structure,
                n_steps=arguments.steps,
            )
        )
        rows.append((f"val_gd, {structure}, statistics given", seconds))
        seconds = _seconds(
            lambda structure=structure: la.optimize_prior_precision(prior_structure=structure)
        )
        rows.append((f"marglik, {structure}", seconds))
        for method in LINEARIZED:
            seconds = _seconds(
                lambda method=method, structure=structure: la.optimize_prior_precision(
                    method=method, train_loader=linearized, prior_structure=structure
                )
            )
            rows.append((f"{method}, {structure}, model given", seconds))
    points, grid_size = arguments.stock_grid_size, arguments.grid_size
    seconds = _stock_seconds(prepared, arguments, points)
    rows.append((f"Stock Kron, gridsearch of {points}", seconds))
    rows.append((f"the same for {grid_size}, in proportion", seconds * grid_size / points))
    costs = [
        {"name": name, "seconds": seconds, "passes": seconds / one_pass} for name, seconds in rows
    ]
    return costs, statistics, linearized


def _stock_seconds(prepared: Prepared, arguments: argparse.Namespace, grid_size: int) -> float:
    """Time the host's class, which predicts from one text at a time at the lowest cost."""
    with tempfile.TemporaryDirectory() as folder:
        prepared.model.save_pretrained(folder, save_embedding_layers=False)
        model = load_fine_tuned(Path(folder), len(LIBRARIES), prepared.device)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_A" in name or "lora_B" in name)
    stock: Any = Laplace(LogitsModel(model), "classification", "all", "kron")
    stock.fit(
        prepared.loader(prepared.train, arguments.batch_size), progress_bar=not arguments.quiet
    )
    loader = prepared.loader(prepared.validation, 1)
    started = time.perf_counter()
    stock.optimize_prior_precision(
        method="gridsearch",
        val_loader=loader,
        grid_size=grid_size,
        link_approx="probit",
        progress_bar=not arguments.quiet,
    )
    return time.perf_counter() - started


def _choices(
    la: Any,
    validation: PredictiveStatistics,
    linearized: LinearizedModel,
    test: PredictiveStatistics,
    arguments: argparse.Namespace,
) -> tuple[list[dict[str, Any]], dict[str, TuningHistory], dict[str, float]]:
    """Measure what each way of choosing is worth on the test texts."""
    histories: dict[str, TuningHistory] = {}
    rows = []
    searches: list[tuple[str, dict[str, Any]]] = [
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
        chosen = {"val_loader": validation, "link_approx": link, "n_samples": 1000}
        searches.append((f"gridsearch, {link}", {"method": "gridsearch", **chosen}))
        searches += [
            (
                f"val_gd, {structure}, {link}",
                {
                    **chosen,
                    "method": "val_gd",
                    "prior_structure": structure,
                    "n_samples": 100,
                    "n_steps": arguments.steps,
                },
            )
            for structure in STRUCTURES
        ]
    shares: dict[str, float] = {}
    for name, search in searches:
        histories[name] = la.optimize_prior_precision(**search)
        if name == "marglik, layerwise":
            shares = la.variance_by_layer(test).by_block
        row: dict[str, Any] = {
            "name": name,
            "prior_precision": f"{la.prior_precision.log().mean().exp().item():.3g}",
            "prior_precisions": la.prior_precision.tolist(),
            "objective": histories[name].objective.tolist(),
            "step": histories[name].step.tolist(),
        }
        moments = test.moments(la.prior_precision)
        for link in LINKS:
            probabilities = la(moments, link_approx=link, n_samples=arguments.samples)
            measured = quality(probabilities.cpu(), test.targets)  # pyright: ignore[reportArgumentType]
            row |= {f"{link}_{key}": value for key, value in measured.items()}
        rows.append(row)
    map_quality = quality(test.f_mu.softmax(-1), test.targets)  # pyright: ignore[reportArgumentType]
    rows.append(
        {"name": "MAP", "prior_precision": "none"}
        | {f"{link}_{key}": value for link in LINKS for key, value in map_quality.items()}
    )
    return rows, histories, shares


def _seconds(job: Callable[[], object]) -> float:
    """Median time of a job."""
    times = []
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        job()
        times.append(time.perf_counter() - started)
    return stdlib_statistics.median(times)


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
    modules: dict[str, dict[str, float]] = {}
    for name, share in by_block.items():
        module, _, rest = name.partition(".lora_")
        modules.setdefault(module.split("encoder.")[-1], {})[rest[0]] = share
    figure = Figure(figsize=(8, 0.3 * len(modules) + 1.5), layout="constrained")
    panel = figure.subplots()
    places = torch.arange(len(modules))
    for offset, matrix in ((-0.2, "A"), (0.2, "B")):
        shares = [share[matrix] for share in modules.values()]
        panel.barh(places + offset, shares, height=0.4, label=f"lora_{matrix}")
    panel.set_yticks(places, list(modules))
    panel.invert_yaxis()
    panel.set_xlabel("Share of the variance of the test texts' logits")
    panel.legend(frameon=False)
    figure.savefig(path, dpi=150)
