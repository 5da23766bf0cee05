"""What the benchmark of costs leaves behind: tables and a plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.report import markdown_table

NOTHING = "-"
GROWTH_COLUMNS = (
    ("name", "What", "{}"),
    ("against", "Grows with", "{}"),
    ("sizes", "Sizes", "{}"),
    ("seconds", "Seconds", "{}"),
    ("exponent", "Exponent", "{}"),
)


def cost_report(figures: dict[str, Any]) -> str:
    """Put all figures into words and tables.

    Parameters
    ----------
    figures : dict
        As in cost.json.

    Returns
    -------
    report : str
        Markdown.
    """
    settings, machine = figures["settings"], figures["machine"]
    hardware = machine["accelerator"] or f"{machine['processor']}, threads: {machine['threads']}"
    parts = [
        "Random weights in the shape of Llama, with LoRA layers of r "
        f"{settings['rank']} on q_proj and v_proj: they stand for shapes and speed only.\n"
        f"A fit sees batches of {settings['batch_size']} texts of "
        f"{settings['length']} tokens, {settings['classes']} classes; its decomposition is "
        "included.\nBare loops are the model's passes alone: one forward and C - 1 backward "
        "passes for a fit, C for a prediction (probit);\nbayesian-lora fits by one sampled label "
        "and one backward pass, at the last token alone.\nSeconds are medians (minimum to maximum; "
        f"of {settings['repetitions']} calls after one that warms up, where no other number is "
        "given).\nMegabytes are peaks over model and data; a prediction's include the posterior "
        "in memory; rivals that hold whole Jacobians predict eight texts at most. "
        f"{hardware}; {figures['seconds']:.0f} s in all."
    ]
    for shape in figures["shapes"]:
        parts.append(
            f"Hidden size {shape['hidden_size']}, layers: {shape['layers']}, {shape['dtype']}, "
            f"batches of a fit: {shape['batches']}"
        )
        parts.append(_shape_table(shape, settings["repetitions"]))
        failures = [
            f"- {row['name']}, {failure['what']}: {failure['reason']}"
            for row in shape["contestants"]
            for failure in row["failures"]
        ]
        if failures:
            parts.append("\n".join(failures))
    parts.append(
        "Growth: exponents of least squares in logarithms. What a fit adds to the bare loop, for "
        "a batch and a layer;\nthen the library's own part alone, and its stock counterpart."
    )
    parts.append(markdown_table(_growth_rows(figures), GROWTH_COLUMNS))
    return "\n\n".join(parts)


def draw_costs(shapes: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw times and memory against the hidden size, a line a contestant.

    Parameters
    ----------
    shapes : sequence of dict
        Shapes with their contestants' figures; those of the first dtype are drawn.
    path : Path
        PNG file to write.
    """
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    fit, predict, memory = figure.subplots(1, 3)
    drawn = [shape for shape in shapes if shape["dtype"] == shapes[0]["dtype"]]
    lines: dict[str, list[list[tuple[int, float]]]] = {}
    for shape in drawn:
        size = shape["hidden_size"]
        for row in shape["contestants"]:
            points = lines.setdefault(row["name"], [[], [], []])
            prediction = _prediction(row, shape["headline_batch_size"])
            if row["fit"]:
                points[0].append((size, row["fit"]["seconds_per_batch"]))
            if prediction:
                points[1].append((size, prediction["median"]))
            peaks = [part["peak_megabytes"] for part in (row["fit"], prediction) if part]
            if peaks:
                points[2].append((size, max(peaks)))
    for name, series in lines.items():
        for panel, points in zip((fit, predict, memory), series, strict=True):
            panel.plot(*zip(*sorted(points), strict=True) if points else ((), ()), "o-", label=name)
    fit.set(title="Fit", ylabel="Seconds a batch")
    batch_size = drawn[0]["headline_batch_size"]
    predict.set(title=f"Prediction, batch {batch_size}", ylabel="Seconds")
    memory.set(title="Peak memory of both, over model and data", ylabel="MB")
    for panel, series in ((fit, 0), (predict, 1), (memory, 2)):
        panel.set_xlabel("Hidden size (random weights)")
        if any(points[series] for points in lines.values()):
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xticks([shape["hidden_size"] for shape in drawn])
            panel.xaxis.set_major_formatter("{x:.0f}")
            panel.set_xticks([], minor=True)
    handles, labels = fit.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)


def _shape_table(shape: dict[str, Any], repetitions: int) -> str:
    """One row for each contestant, one pair of columns for each batch size."""
    headline = shape["headline_batch_size"]
    batch_sizes = sorted(
        {prediction["batch_size"] for row in shape["contestants"] for prediction in row["predict"]}
    )
    columns = [
        ("name", "Contestant", "{}"),
        ("fit", "Fit (s a batch)", "{}"),
        ("fit_ratio", "In bare loops", "{}"),
    ]
    for size in batch_sizes:
        columns.append((f"predict_{size}", f"Predict {size} (s)", "{}"))
        columns.append((f"predict_ratio_{size}", "In bare loops", "{}"))
    columns += [
        ("fit_megabytes", "Fit (MB)", "{}"),
        ("predict_megabytes", f"Predict {headline} (MB)", "{}"),
        ("posterior_megabytes", "Posterior (MB)", "{}"),
    ]
    rows = []
    for row in shape["contestants"]:
        fit, prediction = row["fit"] or {}, _prediction(row, headline) or {}
        cells = {
            "name": row["name"],
            "fit": _spread(fit, repetitions, fit["batches"]) if fit else NOTHING,
            "fit_ratio": _number(fit.get("in_bare_loops"), ".2f"),
            "fit_megabytes": _number(fit.get("peak_megabytes"), ".1f"),
            "predict_megabytes": _number(prediction.get("peak_megabytes"), ".1f"),
            "posterior_megabytes": _number(row["posterior_megabytes"], ".2f"),
        }
        for size in batch_sizes:
            prediction = _prediction(row, size) or {}
            cells[f"predict_{size}"] = _spread(prediction, repetitions) if prediction else NOTHING
            cells[f"predict_ratio_{size}"] = _number(prediction.get("in_bare_loops"), ".2f")
        rows.append(cells)
    return markdown_table(rows, columns)


def _growth_rows(figures: dict[str, Any]) -> list[dict[str, str]]:
    rows = [
        (
            f"{series['name']}, fit",
            "hidden size",
            series["hidden_sizes"],
            series["added_seconds_per_batch_and_layer"],
            series["exponent"],
        )
        for series in figures["fit_growth"]
    ]
    rows += [
        (
            series["name"],
            series["against"],
            series["sizes"],
            [figure["median"] for figure in series["figures"]],
            series["exponent"],
        )
        for series in figures["growth"]
    ]
    return [
        {
            "name": name,
            "against": against,
            "sizes": " ".join(str(size) for size in sizes) or NOTHING,
            "seconds": " ".join(f"{seconds:.2g}" for seconds in medians) or NOTHING,
            "exponent": _number(exponent, ".2f"),
        }
        for name, against, sizes, medians, exponent in rows
    ]


def _prediction(row: dict[str, Any], batch_size: int) -> dict[str, Any] | None:
    return next((p for p in row["predict"] if p["batch_size"] == batch_size), None)


def _spread(figures: dict[str, Any], repetitions: int, parts: int = 1) -> str:
    """Median and range, and the number of calls where it is not the usual one."""
    median, least, most = (figures[key] / parts for key in ("median", "minimum", "maximum"))
    text = f"{median:.3g} ({least:.3g} to {most:.3g}"
    if figures["repetitions"] != repetitions:
        text += f"; of {figures['repetitions']}"
    if not figures["warmed_up"]:
        text += ", not warmed up"
    return text + ")"


def _number(number: float | None, form: str) -> str:
    return NOTHING if number is None else format(number, form)
