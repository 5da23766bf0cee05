"""What the fidelity experiment leaves behind: means, a front, tables, sentences and a plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.report import Column, Row, table

GOAL_ERROR = 0.10
GOAL_MEMORY_SHARE = 0.10
MARKERS = {"gradient": "o", "expand": "s", "reduce": "^", "kron": "X", "diag": "P"}
COLORS = {"gradient": "tab:blue", "expand": "tab:orange", "reduce": "tab:green"}
IDENTITY = ["name", "structure", "is_default", "kfac_approx", "rank", "tail"]

MODEL_COLUMNS = (
    ("model", "Model", ""),
    ("seed", "Seed", ""),
    ("weights", "LoRA weights", ""),
    ("train_accuracy", "Accuracy, training", ".3f"),
    ("train_nll", "NLL, training", ".3f"),
    ("test_accuracy", "Accuracy, test", ".3f"),
    ("prior_precision", "Prior precision", ".3g"),
    ("full_covariance_error", "Block-diagonal from full", ".3f"),
)
CURVATURE_COLUMNS = (
    ("name", "Curvature", ""),
    ("kilobytes", "Memory (kB)", ".1f"),
    ("covariance_error", "Covariance", ".3f"),
    ("full_covariance_error", "Covariance, from full", ".3f"),
    ("covariance_trace_ratio", "Variance ratio", ".2f"),
    ("block_error", "Blocks", ".3f"),
    ("trace_ratio", "Trace ratio", ".2f"),
    ("log_det_error", "Log-det (nats a weight)", ".4f"),
    ("log_det_relative_error", "Log-det, relative", ".3f"),
    ("own_prior_precision_ratio", "Own prior precision", ".2f"),
    ("on_front", "Front", ""),
)


def means(rows: Sequence[Row]) -> list[Row]:
    """Average the figures of each curvature, and say which ones are on the front.

    `on_front` is "yes" where no other one has a smaller covariance error without more memory.
    """
    frame = pd.DataFrame(rows).astype({name: object for name in IDENTITY})
    groups = frame.drop(columns=["model", "seed"], errors="ignore").groupby(
        IDENTITY, sort=False, dropna=False
    )
    averages = groups.mean().reset_index()
    points = averages[["kilobytes", "covariance_error"]].itertuples(index=False, name=None)
    front = pareto_front(list(points))
    averages["on_front"] = ["yes" if place in front else "" for place in averages.index]
    averages = averages.astype(object)
    return averages.where(averages.notna(), None).to_dict("records")


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Places of the points to which no other point is equal or lower in both costs, lower in one.

    They are sorted by their first cost.
    """

    def is_beaten(point: tuple[float, float]) -> bool:
        return any(
            other != point and other[0] <= point[0] and other[1] <= point[1] for other in points
        )

    places = [place for place, point in enumerate(points) if not is_beaten(point)]
    return sorted(places, key=lambda place: points[place])


def verdict(rows: Sequence[Row]) -> dict[str, Any]:
    """Compare the default's covariance errors with the goals, and with every other curvature's.

    `errors` and `stock_kron_errors` are of every seed, by model; the goals are to be met on every
    model and seed; `better` are those that have smaller errors on every model and seed, without
    more memory.
    """
    frame = pd.DataFrame(rows)
    overall = {row["name"]: row for row in means(rows)}
    default = next(row["name"] for row in rows if row["is_default"])
    stock = next(row["name"] for row in rows if row["structure"] == "kron")
    seeds = frame.groupby(["name", "model"]).cumcount().rename("seed")
    errors = frame.pivot_table("covariance_error", ["model", seeds], "name", sort=False)
    listed = {
        name: errors[name].groupby("model", sort=False).agg(list).to_dict()
        for name in (default, stock)
    }
    is_below_default = errors.lt(errors[default], axis=0).all()
    memory = overall[default]["kilobytes"]
    share = memory / overall[stock]["kilobytes"]
    return {
        "default": default,
        "errors": listed[default],
        "stock_kron_errors": listed[stock],
        "memory_share": share,
        "meets_error": bool((errors[default] <= GOAL_ERROR).all()),
        "meets_stock_kron": bool((errors[default] < errors[stock]).all())
        and share < GOAL_MEMORY_SHARE,
        "on_front": bool(overall[default]["on_front"]),
        "better": [
            name
            for name, row in overall.items()
            if row["kilobytes"] <= memory and is_below_default[name]
        ],
    }


def sentences(judged: dict[str, Any]) -> str:
    """A verdict in words."""

    def listed(by_model: dict[str, list[float]]) -> str:
        return "; ".join(
            f"{model} {' and '.join(f'{error:.3f}' for error in errors)}"
            for model, errors in by_model.items()
        )

    def met(is_met: bool) -> str:
        return "met" if is_met else "MISSED"

    return "\n".join(
        [
            f"- The default is {judged['default']}. Its covariance errors, by seed: "
            f"{listed(judged['errors'])}. Goal, at most {GOAL_ERROR:.2f}: "
            f"{met(judged['meets_error'])}.",
            f"- Stock Kron's: {listed(judged['stock_kron_errors'])}. Goal, below each of these at "
            f"less than {GOAL_MEMORY_SHARE:.2f} of its memory, which is "
            f"{judged['memory_share']:.3f} here: {met(judged['meets_stock_kron'])}.",
            f"- The default is {'' if judged['on_front'] else 'NOT '}on the front of mean "
            "covariance error against memory.",
            "- Smaller errors on every model and seed without more memory: "
            f"{'; '.join(judged['better']) or 'none'}.",
        ]
    )


def text_of(
    models: Sequence[Row],
    by_model: dict[str, list[Row]],
    overall: Sequence[Row],
    judged: dict[str, Any],
) -> str:
    """All tables, with what they mean."""
    columns: list[Column] = [("name", "Curvature", "")]
    columns += [(model, model, ".3f") for model in by_model]
    rows = [
        {"name": row["name"]}
        | {model: own[place]["covariance_error"] for model, own in by_model.items()}
        for place, row in enumerate(overall)
    ]
    return "\n\n".join(
        [
            "The models. The prior precision is the scalar that maximises the evidence of the exact"
            " block-diagonal GGN. All that follows is computed with it, in float64.",
            table(models, MODEL_COLUMNS),
            "Means over all models and seeds. Errors are Frobenius norms of differences in units "
            "of the norm of the exact one: of the covariance of the test texts' logits, and of the "
            "curvature within blocks. Unless it says full, the exact one is block-diagonal. The "
            "log-determinant is that of the posterior precision; its relative error is in units of "
            "log det(I + H / prior precision). The own prior precision is the one that an "
            "approximation's own evidence would choose, in units of the exact one's. Memory is "
            "that of what a fit keeps, in float32.",
            table(overall, CURVATURE_COLUMNS),
            "Error of the covariance from that of the exact block-diagonal GGN, means over seeds.",
            table(rows, columns),
            sentences(judged),
        ]
    )


def draw(panels: dict[str, Sequence[Row]], path: Path) -> None:
    """Draw covariance error against memory, one panel for each set of rows."""
    figure = Figure(figsize=(4 * len(panels), 4.6), layout="constrained")
    grid = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)
    for axes, (title, rows) in zip(grid.flat, panels.items(), strict=True):
        _draw_panel(axes, rows)
        axes.set_title(title, fontsize=10)
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
    figure.supxlabel("Memory kept in float32, kB")
    figure.supylabel("Error of the predictive covariance")
    figure.legend(handles=_legend(), loc="outside upper center", ncols=8, frameon=False)
    figure.savefig(path, dpi=150)


def _draw_panel(axes: Axes, rows: Sequence[Row]) -> None:
    points = [(row["kilobytes"], row["covariance_error"]) for row in rows]
    front = [points[place] for place in pareto_front(points)]
    axes.plot(*zip(*front, strict=True), color="0.6", linewidth=1, drawstyle="steps-post", zorder=1)
    for point, row in zip(points, rows, strict=True):
        kind = row["kfac_approx"] or row["structure"]
        color = COLORS.get(kind, "black")
        face = "none" if row["tail"] is False else color
        axes.plot(*point, marker=MARKERS[kind], color=color, markerfacecolor=face)
        if row["is_default"]:
            axes.plot(*point, marker="o", color="red", markerfacecolor="none", markersize=14)


def _legend() -> list[Line2D]:
    def handle(label: str, **style: Any) -> Line2D:
        return Line2D([], [], **{"linestyle": "none", "label": label, **style})

    kinds = {name: name if name in COLORS else f"stock {name}" for name in MARKERS}
    return [
        *(
            handle(label, marker=MARKERS[name], color=COLORS.get(name, "black"))
            for name, label in kinds.items()
        ),
        handle("no tail", marker="o", color="0.4", markerfacecolor="none"),
        handle("default", marker="o", color="red", markerfacecolor="none", markersize=12),
        handle("front", color="0.6", linestyle="-"),
    ]
