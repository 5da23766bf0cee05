"""Means, tables and plot of the fidelity experiment."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.report import Figures, Row, save, table

MARKERS = {"gradient": "o", "expand": "s", "reduce": "^", "kron": "X", "diag": "P"}
COLORS = {"gradient": "tab:blue", "expand": "tab:orange", "reduce": "tab:green"}
IDENTITY = ["name", "structure", "is_default", "kfac_approx", "rank", "tail"]


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
    averages = averages.astype(object)
    return averages.where(averages.notna(), None).to_dict("records")


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
        table(figures["models"], list(figures["models"][0])),
        "Means over all models and seeds. Errors are Frobenius norms of differences from the "
        "exact block-diagonal GGN, or the full one, in units of its norm. Memory is that of what a "
        "fit keeps, in float32. Errors that are smaller on every model and seed are below stock "
        f"Kron's, and below the default's ({default}).",
        table(overall, [key for key in overall[0] if key not in IDENTITY[1:]]),
        "Error of the covariance, means over seeds.",
        table(rows, list(rows[0])),
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
