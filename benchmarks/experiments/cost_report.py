"""What the cost experiment leaves behind: tables and a plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.report import NOTHING, Figures, Row, hardware_of, save, table

NUMBERS = ["median", "batches", "peak_megabytes"]
HEADLINE = "predict 8"  # the prediction that is drawn, where it has been measured


def text_of(figures: Figures) -> str:
    """Put all figures into words and tables."""
    settings = figures["settings"]
    repetitions = settings["repetitions"]
    parts = [
        f"Random weights in the shape of Llama: they stand for shapes and speed only. Batches of a "
        f"fit have {settings['batch_size']} texts of {settings['length']} tokens, "
        f"{settings['classes']} classes; its seconds are those of a batch.\nBare loops are the "
        "model's passes alone; bayesian-lora fits by one sampled label and one backward pass.\n"
        f"Seconds are medians of {repetitions} warm calls, if no number is given; megabytes are "
        f"peaks over model and data.\n{hardware_of(figures)}; {figures['seconds']:.0f} s in all."
    ]
    shapes: dict[str, dict[str, Row]] = {}
    for row in figures["measurements"]:
        shape = f"Hidden size {row['hidden_size']}, layers: {row['layers']}, {row['dtype']}"
        cells = shapes.setdefault(shape, {}).setdefault(row["name"], {"name": row["name"]})
        phase = row["phase"]
        cells[f"{phase} (s)"] = _spread(row, repetitions)
        cells[f"{phase} (bare loops)"] = row["in_bare_loops"]
        cells[f"{phase} (MB)"] = row["peak_megabytes"]
        if phase == "fit":
            cells["posterior_megabytes"] = row["posterior_megabytes"]
    for shape, of_shape in shapes.items():
        columns = dict.fromkeys(key for cells in of_shape.values() for key in cells)
        parts += [shape, table(list(of_shape.values()), list(columns))]
    failures = [
        f"- {row['name']} ({row['hidden_size']}, {row['dtype']}), {row['what']}: {row['reason']}"
        for row in figures["failures"]
    ]
    parts += ["\n".join(failures)] if failures else []
    parts.append(
        "Growth: exponents of least squares in logarithms. What a fit adds to the bare loop, for "
        "a batch and a layer; then the library's own part alone, and its stock counterpart."
    )
    series = [
        {
            **row,
            "sizes": " ".join(map(str, row["sizes"])) or NOTHING,
            "seconds": " ".join(f"{each:.2g}" for each in row["seconds"]) or NOTHING,
        }
        for row in figures["growth"]
    ]
    return "\n\n".join([*parts, table(series, ["name", "against", "sizes", "seconds", "exponent"])])


def draw_costs(measured: Sequence[Row], path: Path) -> None:
    """Draw times and memory against the hidden size, a line a method, for the first dtype."""
    frame: Any = pd.DataFrame(measured, columns=["name", "hidden_size", "dtype", "phase", *NUMBERS])
    frame = frame[frame["dtype"] == frame["dtype"].get(0)].sort_values("hidden_size", kind="stable")
    predicted = frame.loc[frame["phase"] != "fit", "phase"]
    headline = HEADLINE if HEADLINE in set(predicted) else predicted.min()
    drawn = frame[frame["phase"].isin(["fit", headline])]
    drawn = drawn.assign(seconds=drawn["median"] / drawn["batches"])
    peaks = drawn.groupby(["name", "hidden_size"], sort=False)["peak_megabytes"].max()
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    panels = figure.subplots(1, 3)
    for panel, title, values in (
        (panels[0], "Fit, seconds a batch", drawn[drawn["phase"] == "fit"]),
        (panels[1], f"{headline}, seconds", drawn[drawn["phase"] == headline]),
        (panels[2], "Peak memory of both over model and data, MB", peaks.reset_index()),
    ):
        for name, of_method in values.groupby("name", sort=False):
            panel.plot(of_method["hidden_size"], of_method.iloc[:, -1], "o-", label=name)
        panel.set(title=title, xlabel="Hidden size (random weights)")
        if len(values):
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xticks(values["hidden_size"].unique())
            panel.xaxis.set_major_formatter("{x:.0f}")
    save(figure, path, panels[0], columns=4)


def _spread(row: Row, repetitions: int) -> str:
    """Median and range of a batch, and the number of calls where it is not the usual one."""
    median, least, most = (row[key] / row["batches"] for key in ("median", "minimum", "maximum"))
    text = f"{median:.3g} ({least:.3g} to {most:.3g}"
    if row["repetitions"] != repetitions:
        text += f"; of {row['repetitions']}"
    return text + (")" if row["warmed_up"] else ", not warmed up)")
