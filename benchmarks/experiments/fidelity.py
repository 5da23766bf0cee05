"""How close each curvature comes to the exact one, and how much memory it needs."""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from benchmarks.experiments import curvature_errors as exactly
from benchmarks.experiments.fidelity_models import ANSWERING, ANSWERS, LORA, TARGETS, SmallModel
from benchmarks.fine_tuning import fine_tune
from benchmarks.methods import posterior
from benchmarks.methods.method import Posterior, labels_of
from benchmarks.methods.posteriors import over_lora
from benchmarks.models import encoder_folder, load_tokenizer
from benchmarks.options import Fidelity
from benchmarks.report import Figures, Result, Row, records, save, table
from benchmarks.tasks.docstrings import DOCSTRINGS, LIBRARIES
from benchmarks.tasks.task import Sizes, Task
from laplace_lora_ext.curvature.backend import LowRankKronInterface
from laplace_lora_ext.curvature.statistics import KFAC_APPROX

KEYWORDS = ("kfac_approx", "rank", "tail")
_PARAMETERS = inspect.signature(LowRankKronInterface).parameters
MARKERS = {"gradient": "o", "expand": "s", "reduce": "^", "kron": "X", "diag": "P"}
COLORS = {"gradient": "tab:blue", "expand": "tab:orange", "reduce": "tab:green"}
IDENTITY = ["name", "structure", "is_default", "kfac_approx", "rank", "tail"]
Curvature = tuple[Posterior, dict[str, Any]]
DEFAULTS: dict[str, Any] = {keyword: _PARAMETERS[keyword].default for keyword in KEYWORDS}


def all_curvatures(ranks: Iterable[int], hidden_size: int) -> Iterator[Curvature]:
    """Every curvature to compare, with its settings; the host's structures have none."""
    sizes = [
        (f"rank {rank}{', tail' if tail else ''}", rank, tail)
        for rank in sorted({*ranks, DEFAULTS["rank"]})
        for tail in (True, False)
    ]
    for kfac_approx in KFAC_APPROX:
        for title, *size in (*sizes, ("full rank", hidden_size, False)):
            settings: dict[str, Any] = dict(zip(KEYWORDS, (kfac_approx, *size), strict=True))
            build = partial(over_lora, backend_kwargs=settings)
            yield Posterior("lowrank_kron", f"{kfac_approx}, {title}", build), settings
    yield from ((posterior(key), {}) for key in ("kron", "diag"))


def run(options: Fidelity) -> Iterator[Result]:
    """Measure every curvature on every model and seed; then draw."""
    transformers.logging.set_verbosity_error()
    models, rows = [], []
    for seed in options.seeds:
        sizes = Sizes(
            options.base_examples, options.test_examples, validation=options.train_examples
        )
        task = DOCSTRINGS.draw(options, seed, sizes)
        for model in TARGETS:
            labels = {"model": model, "seed": seed}
            facts, measured = _measure(model, task, seed, options)
            models.append(labels | facts)
            rows += [labels | row for row in measured]
    figures = {"classes": list(LIBRARIES), "models": models, "curvatures": rows}
    figures |= {"means": means(rows)}
    by_model = {model: means([row for row in rows if row["model"] == model]) for model in TARGETS}
    yield figures, text_of(figures, by_model)
    draw({"mean of all": figures["means"], **by_model}, options.output / "fidelity.png")


def _measure(name: str, task: Task, seed: int, options: Fidelity) -> tuple[Row, list[Row]]:
    """Train one model; return facts about it, and each curvature's errors."""
    folder = encoder_folder()  # for its tokenizer, not its weights
    settings = replace(LORA, model=name, target_modules=TARGETS[name])
    settings = settings.for_epochs(options.epochs, len(task.validation), warmup=0)
    if name == ANSWERING:
        task = replace(task, classes=ANSWERS, is_prompt=True)
    small = SmallModel(task, settings, load_tokenizer(folder), folder, options, seed)
    train, test = small.records(task.validation), small.records(task.test)
    model = fine_tune(small, train, seed)
    # A Llama's norms still compute in float32, for all curvatures alike.
    model.model.double()
    weights = model.lora_weights
    sizes = [weight.numel() for weight in weights]
    # One text at a time, so that none is padded.
    (Js, logits), (test_Js, test_logits) = (
        exactly.jacobians(model.logits_model, weights, tqdm(alone, disable=options.quiet))
        for alone in (small.loader(train, 1), small.loader(test, 1))
    )
    labels, test_labels = (labels_of(small.loader(texts)) for texts in (train, test))
    curvature = exactly.DenseCurvature.of_softmax(Js, logits, sizes)
    flat = torch.cat([weight.detach().flatten() for weight in weights])
    prior_precision = exactly.evidence_prior_precision(curvature, flat)
    full = exactly.DenseCurvature.of_softmax(Js, logits, [sum(sizes)])
    full_covariance = full.covariance(test_Js, prior_precision)
    known = (curvature, full_covariance, test_Js, prior_precision)
    rows = []
    curvatures = list(all_curvatures(options.ranks, options.hidden_size))
    for method, settings in tqdm(curvatures, desc=name, disable=options.quiet):
        la = method.build(model)
        la.fit(small.loader(train))
        la.optimize_prior_precision(method="marglik")
        found = exactly.DenseCurvature.of_fit(la.H, sizes)
        row = {"name": method.title, "structure": method.key, "is_default": settings == DEFAULTS}
        row |= {keyword: settings.get(keyword) for keyword in KEYWORDS}
        row |= exactly.errors(found, *known)
        row["own_prior_precision_ratio"] = la.prior_precision.item() / prior_precision
        rows.append({**row, "kilobytes": exactly.kilobytes_kept(la.H)})
    facts = {
        "weights": sum(sizes),
        "train_accuracy": (logits.argmax(-1) == labels).double().mean().item(),
        "train_nll": cross_entropy(logits, labels).item(),
        "test_accuracy": (test_logits.argmax(-1) == test_labels).double().mean().item(),
        "prior_precision": prior_precision,
        "full_covariance_error": exactly.errors(curvature, *known)["full_covariance_error"],
    }
    return facts, rows


def means(rows: Sequence[Row]) -> list[Row]:
    """Average each curvature's figures, and compare it with the others on all models and seeds.

    A curvature is on the front if no other has a smaller covariance error in as little memory.
    """
    frame: Any = pd.DataFrame(rows)
    frame[IDENTITY] = frame[IDENTITY].astype(object)
    repetition = frame.groupby("name").cumcount()
    errors = frame.pivot_table("covariance_error", repetition, "name", sort=False)
    figures = frame.drop(columns=["model", "seed"], errors="ignore")
    averages = figures.groupby(IDENTITY, sort=False, dropna=False).mean().reset_index()
    stock = averages[averages["structure"] == "kron"].iloc[0]
    default = averages[averages["is_default"].astype(bool)].iloc[0]
    for title, rival in (("below_stock_kron", stock), ("below_default", default)):
        averages[title] = averages["name"].map(errors.lt(errors[rival["name"]], axis=0).all())
    averages["worst_covariance_error"] = averages["name"].map(errors.max())
    averages["share_of_stock_kron"] = averages["kilobytes"] / stock["kilobytes"]
    points = averages[["kilobytes", "covariance_error"]].itertuples(index=False, name=None)
    averages["on_front"] = on_front(list(points))
    return records(averages)


def on_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Whether no other point is as good in both costs and better in one."""
    return [not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points) for p in points]


def text_of(figures: Figures, by_model: dict[str, list[Row]]) -> list[str]:
    """All tables, explained."""
    overall = figures["means"]
    rows = [
        {"name": row["name"]}
        | {model: own[place]["covariance_error"] for model, own in by_model.items()}
        for place, row in enumerate(overall)
    ]
    default = next(row["name"] for row in overall if row["is_default"])
    return [
        "The models. The prior precision is the scalar that maximises the evidence of the exact "
        "block-diagonal GGN. All that follows is computed with it, in float64.",
        table(figures["models"]),
        "Means over all models and seeds. Errors are Frobenius norms of differences from the "
        "exact block-diagonal GGN, or the full one, in units of its norm. Memory is that of what a "
        "fit keeps, in float32. Errors that are smaller on every model and seed are below stock "
        f"Kron's, and below the default's ({default}).",
        table(overall, [key for key in overall[0] if key not in IDENTITY[1:]]),
        "Error of the covariance, means over seeds.",
        table(rows),
    ]


def draw(panels: dict[str, Sequence[Row]], path: Path) -> None:
    """Draw covariance error against memory, a panel for each set of rows."""
    figure = Figure(figsize=(4 * len(panels), 4.6), layout="constrained")
    grid = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (title, rows) in zip(grid, panels.items(), strict=True):
        _draw_panel(axes, rows)
        axes.set(xscale="log", yscale="log", title=title)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
    figure.supxlabel("Memory kept in float32, kB")
    figure.supylabel("Error of the predictive covariance")
    save(figure, path, grid[0], columns=10)


def _draw_panel(axes: Axes, rows: Sequence[Row]) -> None:
    frame: Any = pd.DataFrame(rows).sort_values("kilobytes")
    point = ["kilobytes", "covariance_error"]
    front = frame.loc[frame["on_front"].astype(bool), point]
    axes.plot(*front.values.T, color="0.6", drawstyle="steps-post", label="front")
    kinds = frame["kfac_approx"].fillna(frame["structure"])
    for (kind, cut), alike in frame.groupby([kinds, frame["tail"].eq(False)], sort=False):
        color = COLORS.get(kind, "black")
        style: Any = {"linestyle": "none", "marker": MARKERS[kind], "color": color}
        label = (kind if kind in COLORS else f"stock {kind}") + (", no tail" if cut else "")
        face = "none" if cut else color
        axes.plot(*alike[point].values.T, label=label, markerfacecolor=face, **style)
    default = frame.loc[frame["is_default"].astype(bool), point]
    circle: Any = {"markersize": 14, "markerfacecolor": "none", "label": "default"}
    axes.plot(*default.values.T, "o", color="red", **circle)
