"""Tables and plot of the cost experiment."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import NOTHING, Figures, Row, draw_lines, hardware_of, lines, table

HEADLINE = "predict 8"  # the prediction that is drawn


def text_of(figures: Figures) -> list[str]:
    """All figures in words and tables."""
    settings = figures["settings"]
    repetitions = settings["repetitions"]
    parts = [
        "Random weights in the shape of Llama: they tell about shapes and speed only. The batches "
        f"of a fit have {settings['batch_size']} texts of {settings['length']} tokens and "
        f"{settings['classes']} classes; its seconds are per batch.\nBare loops are the model's "
        "passes alone; bayesian-lora fits with one sampled label and one backward pass.\n"
        f"Seconds are medians of {repetitions} warm calls unless a number is given; megabytes are "
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
    growth = [
        {
            **row,
            "sizes": " ".join(map(str, row["sizes"])) or NOTHING,
            "seconds": " ".join(f"{each:.2g}" for each in row["seconds"]) or NOTHING,
        }
        for row in figures["growth"]
    ]
    return [
        *parts,
        *(["\n".join(failures)] if failures else []),
        "Growth: exponents of least squares in logarithms. What a fit adds to the bare loop, for "
        "a batch and a layer; then the library's own part alone, and its stock counterpart.",
        table(growth, ["name", "against", "sizes", "seconds", "exponent"]),
    ]


def _spread(row: Row, repetitions: int) -> str:
    """Median and range of a batch, and the number of calls where it is not the usual one."""
    median, least, most = (row[key] / row["batches"] for key in ("median", "minimum", "maximum"))
    text = f"{median:.3g} ({least:.3g} to {most:.3g}"
    if row["repetitions"] != repetitions:
        text += f"; of {row['repetitions']}"
    return text + (")" if row["warmed_up"] else ", not warmed up)")


def draw(measured: Sequence[Row], path: Path) -> None:
    """Draw time and memory against the hidden size for the first dtype, a line per method."""
    first = [
        {**row, "seconds": row["median"] / row["batches"]}
        for row in measured
        if row["dtype"] == measured[0]["dtype"]
    ]
    panels = {
        f"{phase}, {unit}": lines([row for row in first if row["phase"] == phase], *axes)
        for unit, axes in (
            ("seconds a batch", ("hidden_size", "seconds")),
            ("MB over model and data", ("hidden_size", "peak_megabytes")),
        )
        for phase in ("fit", HEADLINE)
    }
    draw_lines(path, panels, "Hidden size (random weights)", "log")
