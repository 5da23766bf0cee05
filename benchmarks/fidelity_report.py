"""What the fidelity benchmark leaves behind: means, a front, tables, sentences and a plot."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.fidelity_contestants import Contestant
from benchmarks.report import Column, markdown_table

GOAL_ERROR = 0.10
GOAL_MEMORY_SHARE = 0.10
MARKERS = {"gradient": "o", "expand": "s", "reduce": "^"}
COLORS = {"gradient": "tab:blue", "expand": "tab:orange", "reduce": "tab:green"}
HOST_MARKERS = {"kron": "X", "diag": "P"}

MODEL_COLUMNS = (
    ("model", "Model", "{}"),
    ("seed", "Seed", "{}"),
    ("weights", "LoRA weights", "{}"),
    ("train_accuracy", "Accuracy, training", "{:.3f}"),
    ("train_nll", "NLL, training", "{:.3f}"),
    ("test_accuracy", "Accuracy, test", "{:.3f}"),
    ("prior_precision", "Prior precision", "{:.3g}"),
    ("full_covariance_error", "Block-diagonal from full", "{:.3f}"),
)
CURVATURE_COLUMNS = (
    ("name", "Curvature", "{}"),
    ("kilobytes", "Memory (kB)", "{:.1f}"),
    ("covariance_error", "Covariance", "{:.3f}"),
    ("full_covariance_error", "Covariance, from full", "{:.3f}"),
    ("covariance_trace_ratio", "Variance ratio", "{:.2f}"),
    ("block_error", "Blocks", "{:.3f}"),
    ("trace_ratio", "Trace ratio", "{:.2f}"),
    ("log_det_error", "Log-det (nats a weight)", "{:.4f}"),
    ("log_det_relative_error", "Log-det, relative", "{:.3f}"),
    ("own_prior_precision_ratio", "Own prior precision", "{:.2f}"),
    ("on_front", "Front", "{}"),
)

Row = dict[str, Any]


def means(rows: Iterable[Row], contestants: Sequence[Contestant]) -> list[Row]:
    """Average the figures of each contestant, and say which ones are on the front.

    Parameters
    ----------
    rows : iterable of dict
        ``name`` of a contestant, and its figures on one model.
    contestants : sequence of Contestant
        In the order of the result.

    Returns
    -------
    rows : list of dict
        One for each contestant, with ``on_front``: "yes" where no other one has a smaller
        covariance error without more memory.
    """
    rows = list(rows)
    averages: list[Row] = []
    for contestant in contestants:
        own = [row for row in rows if row["name"] == contestant.name]
        keys = [key for key, value in own[0].items() if isinstance(value, float)]
        averages.append(
            {"name": contestant.name} | {key: fmean(row[key] for row in own) for key in keys}
        )
    front = pareto_front([(row["kilobytes"], row["covariance_error"]) for row in averages])
    for place, row in enumerate(averages):
        row["on_front"] = "yes" if place in front else ""
    return averages


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Find the points that no other point beats.

    Parameters
    ----------
    points : sequence of tuple of float
        Two costs each.

    Returns
    -------
    places : list of int
        Of those to which no other point is equal or lower in both costs and lower in one, by
        their first cost.
    """

    def is_beaten(point: tuple[float, float]) -> bool:
        return any(
            other != point and other[0] <= point[0] and other[1] <= point[1] for other in points
        )

    places = [place for place, point in enumerate(points) if not is_beaten(point)]
    return sorted(places, key=lambda place: points[place])


def verdict(
    rows: Sequence[Row], contestants: Sequence[Contestant], overall: Sequence[Row]
) -> dict[str, Any]:
    """Compare the default's covariance errors with the goals, and with every other contestant's.

    Parameters
    ----------
    rows : sequence of dict
        Figures of every contestant on every model and seed.
    contestants : sequence of Contestant
        All of them.
    overall : sequence of dict
        Means of the rows, in the order of the contestants.

    Returns
    -------
    verdict : dict
        ``default``, its name; ``errors`` and ``stock_kron_errors``, of every seed, by model;
        ``memory_share`` of stock Kron's; ``meets_error`` and ``meets_stock_kron``, on every model
        and seed; ``on_front``, of the means; ``better``, names of those that have smaller errors
        on every model and seed, without more memory.
    """
    default = next(each.name for each in contestants if each.is_default)
    stock = next(each.name for each in contestants if each.hessian_structure == "kron")
    by_name = {row["name"]: row for row in overall}
    by_model: dict[str, dict[str, list[float]]] = {each.name: {} for each in contestants}
    for row in rows:
        errors = by_model[row["name"]].setdefault(row["model"], [])
        errors.append(row["covariance_error"])

    def is_below(name: str, other: str) -> bool:
        own, others = by_model[name], by_model[other]
        return all(
            error < limit
            for model in own
            for error, limit in zip(own[model], others[model], strict=True)
        )

    memory = by_name[default]["kilobytes"]
    share = memory / by_name[stock]["kilobytes"]
    return {
        "default": default,
        "errors": by_model[default],
        "stock_kron_errors": by_model[stock],
        "memory_share": share,
        "meets_error": all(max(errors) <= GOAL_ERROR for errors in by_model[default].values()),
        "meets_stock_kron": is_below(default, stock) and share < GOAL_MEMORY_SHARE,
        "on_front": bool(by_name[default]["on_front"]),
        "better": [
            name
            for name, row in by_name.items()
            if row["kilobytes"] <= memory and is_below(name, default)
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


def report(
    models: Sequence[Row],
    by_model: dict[str, list[Row]],
    overall: Sequence[Row],
    judged: dict[str, Any],
) -> str:
    """All tables, with what they mean.

    Parameters
    ----------
    models : sequence of dict
        What was trained.
    by_model : dict of str to list of dict
        Means over the seeds of each model.
    overall : sequence of dict
        Means over all models.
    judged : dict
        What `verdict` returned.

    Returns
    -------
    text : str
        Markdown.
    """
    columns: list[Column] = [("name", "Curvature", "{}")]
    columns += [(model, model, "{:.3f}") for model in by_model]
    rows = [
        {"name": row["name"]}
        | {model: own[place]["covariance_error"] for model, own in by_model.items()}
        for place, row in enumerate(overall)
    ]
    return "\n\n".join(
        [
            "The models. The prior precision is the scalar that maximises the evidence of the exact"
            " block-diagonal GGN. All that follows is computed with it, in float64.",
            markdown_table(models, MODEL_COLUMNS),
            "Means over all models and seeds. Errors are Frobenius norms of differences in units "
            "of the norm of the exact one: of the covariance of the test texts' logits, and of the "
            "curvature within blocks. Unless it says full, the exact one is block-diagonal. The "
            "log-determinant is that of the posterior precision; its relative error is in units of "
            "log det(I + H / prior precision). The own prior precision is the one that an "
            "approximation's own evidence would choose, in units of the exact one's. Memory is "
            "that of what a fit keeps, in float32.",
            markdown_table(overall, CURVATURE_COLUMNS),
            "Error of the covariance from that of the exact block-diagonal GGN, means over seeds.",
            markdown_table(rows, columns),
            sentences(judged),
        ]
    )


def draw(panels: dict[str, Sequence[Row]], contestants: Sequence[Contestant], path: Path) -> None:
    """Draw covariance error against memory, one panel for each set of rows.

    Parameters
    ----------
    panels : dict of str to sequence of dict
        By title, rows in the order of the contestants.
    contestants : sequence of Contestant
        What the rows are of.
    path : Path
        PNG file to write.
    """
    figure = Figure(figsize=(4 * len(panels), 4.6), layout="constrained")
    grid = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)
    for axes, (title, rows) in zip(grid.flat, panels.items(), strict=True):
        _draw_panel(axes, rows, contestants)
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


def _draw_panel(axes: Axes, rows: Sequence[Row], contestants: Sequence[Contestant]) -> None:
    points = [(row["kilobytes"], row["covariance_error"]) for row in rows]
    front = [points[place] for place in pareto_front(points)]
    axes.plot(*zip(*front, strict=True), color="0.6", linewidth=1, drawstyle="steps-post", zorder=1)
    for point, contestant in zip(points, contestants, strict=True):
        settings = contestant.settings
        if settings:
            color = COLORS[settings["kfac_approx"]]
            marker = MARKERS[settings["kfac_approx"]]
            face = color if settings["tail"] else "none"
        else:
            color = face = "black"
            marker = HOST_MARKERS[contestant.hessian_structure]
        axes.plot(*point, marker=marker, color=color, markerfacecolor=face, linestyle="none")
        if contestant.is_default:
            axes.plot(*point, marker="o", color="red", markerfacecolor="none", markersize=14)


def _legend() -> list[Line2D]:
    def handle(label: str, **style: Any) -> Line2D:
        return Line2D([], [], linestyle=style.pop("linestyle", "none"), label=label, **style)

    handles = [handle(name, marker=marker, color=COLORS[name]) for name, marker in MARKERS.items()]
    handles += [
        handle(f"stock {name}", marker=marker, color="black")
        for name, marker in HOST_MARKERS.items()
    ]
    return [
        *handles,
        handle("no tail", marker="o", color="0.4", markerfacecolor="none"),
        handle("default", marker="o", color="red", markerfacecolor="none", markersize=12),
        handle("front", color="0.6", linestyle="-"),
    ]
