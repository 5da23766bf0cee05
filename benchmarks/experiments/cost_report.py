"""What the cost experiment leaves behind: tables and a plot."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.report import NOTHING, Figures, Row, hardware_of, save, table


def text_of(figures: Figures) -> str:
    """Put all figures into words and tables."""
    settings = figures["settings"]
    parts = [
        f"Random weights in the shape of Llama: they stand for shapes and speed only. Batches of a "
        f"fit have {settings['batch_size']} texts of {settings['length']} tokens, "
        f"{settings['classes']} classes.\nBare loops are the model's passes alone: one forward and "
        "C - 1 backward passes for a fit, C for a prediction (probit); bayesian-lora fits by one "
        "sampled label and one backward pass.\nSeconds are medians (minimum to maximum; of "
        f"{settings['repetitions']} calls after one that warms up, where no other number is given)."
        " Megabytes are peaks over model and data, of predictions with the posterior.\n"
        f"{hardware_of(figures)}; {figures['seconds']:.0f} s in all."
    ]
    for shape in figures["shapes"]:
        parts.append(
            f"Hidden size {shape['hidden_size']}, layers: {shape['layers']}, {shape['dtype']}, "
            f"batches of a fit: {shape['batches']}"
        )
        cells = [_cells(row, shape, settings["repetitions"]) for row in shape["contestants"]]
        parts.append(table(cells, list(cells[0])))
        failures = [
            f"- {row['name']}, {failure['what']}: {failure['reason']}"
            for row in shape["contestants"]
            for failure in row["failures"]
        ]
        parts += ["\n".join(failures)] if failures else []
    parts.append(
        "Growth: exponents of least squares in logarithms. What a fit adds to the bare loop, for "
        "a batch and a layer; then the library's own part alone, and its stock counterpart."
    )
    series = _growth_rows(figures)
    return "\n\n".join([*parts, table(series, list(series[0]))])


def draw_costs(shapes: Sequence[Row], path: Path) -> None:
    """Draw times and memory against the hidden size, a line a method, for the first dtype."""
    drawn = [shape for shape in shapes if shape["dtype"] == shapes[0]["dtype"]]
    fit, predict = "Fit, seconds a batch", "Prediction, seconds"
    memory = "Peak memory of both over model and data, MB"
    points = []
    for shape in drawn:
        for row in shape["contestants"]:
            known, prediction = row["fit"] or {}, _prediction(row, shape["headline_batch_size"])
            peaks = [part["peak_megabytes"] for part in (known, prediction) if part]
            figures = {fit: known.get("seconds_per_batch"), predict: prediction.get("median")}
            place = {"name": row["name"], "size": shape["hidden_size"]}
            points.append({**place, **figures, memory: max(peaks, default=None)})
    frame = pd.DataFrame(points).sort_values("size", kind="stable")
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    panels = figure.subplots(1, 3)
    for panel, key in zip(panels, (fit, predict, memory), strict=True):
        for name, of_method in frame.groupby("name", sort=False):
            known = of_method.dropna(subset=key)
            panel.plot(known["size"], known[key], "o-", label=name)
        panel.set(title=key, xlabel="Hidden size (random weights)")
        if frame[key].notna().any():
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xticks([shape["hidden_size"] for shape in drawn])
            panel.xaxis.set_major_formatter("{x:.0f}")
    save(figure, path, panels[0], columns=4)


def _cells(row: Row, shape: Row, repetitions: int) -> Row:
    """A method's figures by the titles of their columns, a pair for each batch size."""
    fit = row["fit"] or {}
    cells = {
        "name": row["name"],
        "Fit (s a batch)": _spread(fit, repetitions, shape["batches"]),
        "Fit (bare loops)": fit.get("in_bare_loops"),
    }
    every = [prediction for each in shape["contestants"] for prediction in each["predict"]]
    for size in sorted({prediction["batch_size"] for prediction in every}):
        prediction = _prediction(row, size)
        cells[f"Predict {size} (s)"] = _spread(prediction, repetitions)
        cells[f"Predict {size} (bare loops)"] = prediction.get("in_bare_loops")
    size = shape["headline_batch_size"]
    cells["Fit (MB)"] = fit.get("peak_megabytes")
    cells[f"Predict {size} (MB)"] = _prediction(row, size).get("peak_megabytes")
    return {**cells, "Posterior (MB)": row["posterior_megabytes"]}


def _growth_rows(figures: Figures) -> list[Row]:
    def row(name: str, against: str, sizes: list[int], seconds: list[float], series: Row) -> Row:
        return {
            "name": name,
            "grows with": against,
            "sizes": " ".join(map(str, sizes)) or NOTHING,
            "seconds": " ".join(f"{each:.2g}" for each in seconds) or NOTHING,
            "exponent": series["exponent"],
        }

    rows = []
    for each in figures["fit_growth"]:
        added = each["added_seconds_per_batch_and_layer"]
        rows.append(row(f"{each['name']}, fit", "hidden size", each["hidden_sizes"], added, each))
    for each in figures["growth"]:
        medians = [figure["median"] for figure in each["figures"]]
        rows.append(row(each["name"], each["against"], each["sizes"], medians, each))
    return rows


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
    return text + (")" if figures["warmed_up"] else ", not warmed up)")
