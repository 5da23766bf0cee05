"""What the fidelity experiment leaves behind: means, a front, tables, a verdict and a plot."""

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


def means(rows: Sequence[Row]) -> list[Row]:
    """Average the figures of each curvature, and say which ones are on the front.

    `on_front` is "yes" where no other one has a smaller covariance error without more memory.
    """
    frame = pd.DataFrame(rows).drop(columns=["model", "seed"], errors="ignore")
    frame[IDENTITY] = frame[IDENTITY].astype(object)
    averages = frame.groupby(IDENTITY, sort=False, dropna=False).mean().reset_index()
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
    memory = {name: row["kilobytes"] for name, row in overall.items()}
    share = memory[default] / memory[stock]
    beats_stock = bool((errors[default] < errors[stock]).all())
    lighter = [name for name in memory if memory[name] <= memory[default]]
    return {
        "default": default,
        "errors": by_model[default].to_dict(),
        "stock_kron_errors": by_model[stock].to_dict(),
        "memory_share": share,
        "meets_error": bool((errors[default] <= GOAL_ERROR).all()),
        "meets_stock_kron": beats_stock and share < GOAL_MEMORY_SHARE,
        "on_front": bool(overall[default]["on_front"]),
        "better": [name for name in lighter if is_below[name]],
    }


def sentences(judged: dict[str, Any]) -> str:
    """A verdict in words."""
    error, memory = (
        "met" if judged[key] else "MISSED" for key in ("meets_error", "meets_stock_kron")
    )
    return (
        f"The default, {judged['default']}, has {judged['memory_share']:.3f} of stock Kron's memory"
        f" and is {'' if judged['on_front'] else 'NOT '}on the front. Goals on every model and "
        f"seed: an error of at most {GOAL_ERROR:.2f}, {error}; below stock Kron's, at less than "
        f"{GOAL_MEMORY_SHARE:.2f} of its memory, {memory}. Smaller errors everywhere without more "
        f"memory: {'; '.join(judged['better']) or 'none'}."
    )


def text_of(figures: Figures, by_model: dict[str, list[Row]]) -> str:
    """All tables, with what they mean."""
    overall = figures["means"]
    columns = [key for key in overall[0] if key not in IDENTITY[1:]]
    rows = [
        {"name": row["name"]}
        | {model: own[place]["covariance_error"] for model, own in by_model.items()}
        for place, row in enumerate(overall)
    ]
    parts = [
        "The models. The prior precision is the scalar that maximises the evidence of the exact "
        "block-diagonal GGN. All that follows is computed with it, in float64.",
        table(figures["models"], list(figures["models"][0])),
        "Means over all models and seeds. Errors are Frobenius norms of differences in units of "
        "the norm of the exact one, of the covariance of the test texts' logits and of the "
        "curvature within blocks. Unless it says full, the exact one is block-diagonal. The "
        "relative error of the posterior's log-determinant is in units of log det(I + H / prior "
        "precision). Memory is that of what a fit keeps, in float32.",
        table(overall, columns),
        "Error of the covariance from that of the exact block-diagonal GGN, means over seeds.",
        table(rows, list(rows[0])),
        sentences(figures["verdict"]),
    ]
    return "\n\n".join(parts)


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
    save(figure, path, grid[0], columns=10)


def _draw_panel(axes: Axes, rows: Sequence[Row]) -> None:
    frame = pd.DataFrame(rows).sort_values("kilobytes")
    front = frame[frame["on_front"] == "yes"][["kilobytes", "covariance_error"]]
    axes.plot(*front.values.T, color="0.6", drawstyle="steps-post", label="front")
    kinds = frame["kfac_approx"].fillna("stock " + frame["structure"])
    for (name, cut), alike in frame.groupby([kinds, frame["tail"] == False], sort=False):  # noqa: E712
        kind = str(name).removeprefix("stock ")
        color = COLORS.get(kind, "black")
        style: Any = {"linestyle": "none", "marker": MARKERS[kind], "color": color}
        style |= {"markerfacecolor": "none" if cut else color}
        label = f"{name}, no tail" if cut else name
        axes.plot(alike["kilobytes"], alike["covariance_error"], label=label, **style)
    default = frame[frame["is_default"]]
    circle: Any = {"markersize": 14, "markerfacecolor": "none", "label": "default"}
    axes.plot(default["kilobytes"], default["covariance_error"], "o", color="red", **circle)
