"""What the fidelity experiment leaves behind: means, a front, tables, sentences and a plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.report import Figures, Row, save, table

GOAL_ERROR = 0.10
GOAL_MEMORY_SHARE = 0.10
MARKERS = {"gradient": "o", "expand": "s", "reduce": "^", "kron": "X", "diag": "P"}
COLORS = {"gradient": "tab:blue", "expand": "tab:orange", "reduce": "tab:green"}
IDENTITY = ["name", "structure", "is_default", "kfac_approx", "rank", "tail"]
TITLES = {
    "name": "Curvature",
    "kilobytes": "Memory (kB)",
    "covariance_error": "Covariance",
    "full_covariance_error": "Covariance, from full",
    "covariance_trace_ratio": "Variance ratio",
    "block_error": "Blocks",
    "trace_ratio": "Trace ratio",
    "log_det_error": "Log-det (nats a weight)",
    "log_det_relative_error": "Log-det, relative",
    "own_prior_precision_ratio": "Own prior precision",
    "on_front": "Front",
}


def means(rows: Sequence[Row]) -> list[Row]:
    """Average the figures of each curvature, and say which ones are on the front.

    `on_front` is "yes" where no other one has a smaller covariance error without more memory.
    """
    frame = pd.DataFrame(rows).drop(columns=["model", "seed"], errors="ignore")
    groups = frame.astype(dict.fromkeys(IDENTITY, object)).groupby(
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
    repetition = frame.groupby(["name", "model"]).cumcount()
    errors = frame.pivot_table("covariance_error", ["model", repetition], "name", sort=False)
    by_model = errors.groupby(level="model", sort=False).agg(list)
    is_below = errors.lt(errors[default], axis=0).all()
    memory = overall[default]["kilobytes"]
    share = memory / overall[stock]["kilobytes"]
    beats_stock = bool((errors[default] < errors[stock]).all())
    return {
        "default": default,
        "errors": by_model[default].to_dict(),
        "stock_kron_errors": by_model[stock].to_dict(),
        "memory_share": share,
        "meets_error": bool((errors[default] <= GOAL_ERROR).all()),
        "meets_stock_kron": beats_stock and share < GOAL_MEMORY_SHARE,
        "on_front": bool(overall[default]["on_front"]),
        "better": [
            name for name, row in overall.items() if row["kilobytes"] <= memory and is_below[name]
        ],
    }


def sentences(judged: dict[str, Any]) -> str:
    """A verdict in words."""
    own, stock = (
        "; ".join(
            f"{model} {' and '.join(f'{error:.3f}' for error in errors)}"
            for model, errors in judged[key].items()
        )
        for key in ("errors", "stock_kron_errors")
    )
    error, memory = (
        "met" if judged[key] else "MISSED" for key in ("meets_error", "meets_stock_kron")
    )
    return (
        f"- The default is {judged['default']}. Its covariance errors, by seed: {own}. Goal, at "
        f"most {GOAL_ERROR:.2f}: {error}.\n"
        f"- Stock Kron's: {stock}. Goal, below each of these at less than {GOAL_MEMORY_SHARE:.2f} "
        f"of its memory, which is {judged['memory_share']:.3f} here: {memory}.\n"
        f"- The default is {'' if judged['on_front'] else 'NOT '}on the front of mean covariance "
        "error against memory.\n- Smaller errors on every model and seed without more memory: "
        f"{'; '.join(judged['better']) or 'none'}."
    )


def text_of(figures: Figures, by_model: dict[str, list[Row]]) -> str:
    """All tables, with what they mean."""
    overall = figures["means"]
    rows = [
        {"name": row["name"]}
        | {model: own[place]["covariance_error"] for model, own in by_model.items()}
        for place, row in enumerate(overall)
    ]
    return "\n\n".join(
        [
            "The models. The prior precision is the scalar that maximises the evidence of the exact"
            " block-diagonal GGN. All that follows is computed with it, in float64.",
            table(figures["models"], list(figures["models"][0])),
            "Means over all models and seeds. Errors are Frobenius norms of differences in units "
            "of the norm of the exact one: of the covariance of the test texts' logits, and of the "
            "curvature within blocks. Unless it says full, the exact one is block-diagonal. The "
            "relative error of the posterior precision's log-determinant is in units of log det(I "
            "+ H / prior precision). Prior precisions by their own evidence are in units of the "
            "exact one's. Memory is that of what a fit keeps, in float32.",
            table(overall, list(TITLES), TITLES),
            "Error of the covariance from that of the exact block-diagonal GGN, means over seeds.",
            table(rows, list(rows[0]), TITLES),
            sentences(figures["verdict"]),
        ]
    )


def draw(panels: dict[str, Sequence[Row]], path: Path) -> None:
    """Draw covariance error against memory, one panel for each set of rows."""
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
    save(figure, path, grid[0], columns=8)


def _draw_panel(axes: Axes, rows: Sequence[Row]) -> None:
    points = [(row["kilobytes"], row["covariance_error"]) for row in rows]
    front = [points[place] for place in pareto_front(points)]
    axes.plot(*zip(*front, strict=True), color="0.6", drawstyle="steps-post", label="front")
    named = set()
    for point, row in zip(points, rows, strict=True):
        kind = row["kfac_approx"] or row["structure"]
        name = kind if kind in COLORS else f"stock {kind}"
        name += ", no tail" if row["tail"] is False else ""
        color = COLORS.get(kind, "black")
        style = {"marker": MARKERS[kind], "color": color, "linestyle": "none"}
        face = "none" if row["tail"] is False else color
        label = "_" if name in named else name  # each kind is explained once
        named.add(name)
        axes.plot(*point, markerfacecolor=face, label=label, **style)
        if row["is_default"]:
            circle = {"markersize": 14, "markerfacecolor": "none", "linestyle": "none"}
            axes.plot(*point, marker="o", color="red", label="default", **circle)
