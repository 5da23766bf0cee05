"""What the cost experiment leaves behind: tables and a plot."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.report import NOTHING, Column, Figures, Row, add_legend, hardware_of, table

GROWTH_COLUMNS = (
    ("name", "What", ""),
    ("against", "Grows with", ""),
    ("sizes", "Sizes", ""),
    ("seconds", "Seconds", ""),
    ("exponent", "Exponent", ".2f"),
)


def text_of(figures: Figures) -> str:
    """Put all figures into words and tables."""
    settings = figures["settings"]
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
        f"{hardware_of(figures)}; {figures['seconds']:.0f} s in all."
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
    parts.append(table(_growth_rows(figures), GROWTH_COLUMNS))
    return "\n\n".join(parts)


def draw_costs(shapes: Sequence[Row], path: Path) -> None:
    """Draw times and memory against the hidden size, a line a method, for the first dtype."""
    drawn = [shape for shape in shapes if shape["dtype"] == shapes[0]["dtype"]]
    points = pd.DataFrame(
        [
            {"name": row["name"], "size": shape["hidden_size"], **_drawn_figures(shape, row)}
            for shape in drawn
            for row in shape["contestants"]
        ]
    )
    titles = {
        "fit": ("Fit", "Seconds a batch"),
        "predict": (f"Prediction, batch {drawn[0]['headline_batch_size']}", "Seconds"),
        "memory": ("Peak memory of both, over model and data", "MB"),
    }
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    for panel, (key, (title, unit)) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        for name, of_method in points.sort_values("size").groupby("name", sort=False):
            known = of_method.dropna(subset=key)
            panel.plot(known["size"], known[key], "o-", label=name)
        panel.set(title=title, ylabel=unit, xlabel="Hidden size (random weights)")
        if points[key].notna().any():
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xticks([shape["hidden_size"] for shape in drawn])
            panel.xaxis.set_major_formatter("{x:.0f}")
            panel.set_xticks([], minor=True)
    add_legend(figure, "outside upper center", columns=4)
    figure.savefig(path, dpi=150)


def _drawn_figures(shape: Row, row: Row) -> dict[str, float | None]:
    prediction = _prediction(row, shape["headline_batch_size"])
    fit = row["fit"] or {}
    peaks = [part["peak_megabytes"] for part in (fit, prediction) if part]
    return {
        "fit": fit.get("seconds_per_batch"),
        "predict": prediction.get("median"),
        "memory": max(peaks, default=None),
    }


def _shape_table(shape: Row, repetitions: int) -> str:
    """One row for each method, one pair of columns for each batch size."""
    headline = shape["headline_batch_size"]
    batch_sizes = sorted(
        {prediction["batch_size"] for row in shape["contestants"] for prediction in row["predict"]}
    )
    columns: list[Column] = [
        ("name", "Contestant", ""),
        ("fit", "Fit (s a batch)", ""),
        ("fit_ratio", "Fit (bare loops)", ".2f"),
    ]
    for size in batch_sizes:
        columns.append((f"predict_{size}", f"Predict {size} (s)", ""))
        columns.append((f"predict_ratio_{size}", f"Predict {size} (bare loops)", ".2f"))
    columns += [
        ("fit_megabytes", "Fit (MB)", ".1f"),
        ("predict_megabytes", f"Predict {headline} (MB)", ".1f"),
        ("posterior_megabytes", "Posterior (MB)", ".2f"),
    ]
    rows = []
    for row in shape["contestants"]:
        fit = row["fit"] or {}
        cells = {
            **row,
            "fit": _spread(fit, repetitions, fit.get("batches", 1)),
            "fit_ratio": fit.get("in_bare_loops"),
            "fit_megabytes": fit.get("peak_megabytes"),
            "predict_megabytes": _prediction(row, headline).get("peak_megabytes"),
        }
        for size in batch_sizes:
            prediction = _prediction(row, size)
            cells[f"predict_{size}"] = _spread(prediction, repetitions)
            cells[f"predict_ratio_{size}"] = prediction.get("in_bare_loops")
        rows.append(cells)
    return table(rows, columns)


def _growth_rows(figures: Figures) -> list[Row]:
    added = [
        {
            "name": f"{series['name']}, fit",
            "against": "hidden size",
            "sizes": series["hidden_sizes"],
            "seconds": series["added_seconds_per_batch_and_layer"],
            "exponent": series["exponent"],
        }
        for series in figures["fit_growth"]
    ]
    own = [
        {**series, "seconds": [figure["median"] for figure in series["figures"]]}
        for series in figures["growth"]
    ]
    return [
        {
            **series,
            "sizes": " ".join(str(size) for size in series["sizes"]) or NOTHING,
            "seconds": " ".join(f"{seconds:.2g}" for seconds in series["seconds"]) or NOTHING,
        }
        for series in (*added, *own)
    ]


def _prediction(row: Row, batch_size: int) -> Row:
    """Figures of a prediction, empty if there are none."""
    return next((p for p in row["predict"] if p["batch_size"] == batch_size), {})


def _spread(figures: Row, repetitions: int, parts: int = 1) -> str:
    """Median and range, and the number of calls where it is not the usual one."""
    if not figures:
        return NOTHING
    median, least, most = (figures[key] / parts for key in ("median", "minimum", "maximum"))
    text = f"{median:.3g} ({least:.3g} to {most:.3g}"
    if figures["repetitions"] != repetitions:
        text += f"; of {figures['repetitions']}"
    if not figures["warmed_up"]:
        text += ", not warmed up"
    return text + ")"
