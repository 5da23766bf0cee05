"""Tables and plot of the cost experiment."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.options import Cost
from benchmarks.report import NOTHING, Figures, Row, draw_lines, lines, table

HEADLINE = "predict 8"  # the prediction that is drawn


def text_of(figures: Figures, options: Cost) -> list[str]:
    """All figures in words and tables."""
    parts = [
        "Random weights in the shape of Llama: they tell about shapes and speed only. The batches "
        f"of a fit have {options.batch_size} texts of {options.length} tokens and "
        f"{options.classes} classes; its seconds are per batch.\nBare loops are the model's "
        "passes alone; bayesian-lora fits with one sampled label and one backward pass.\nSeconds "
        f"are medians of {options.repetitions} warm calls unless a number is given; megabytes are "
        "peaks over model and data."
    ]
    shapes: dict[str, dict[str, Row]] = {}
    for row in figures["measurements"]:
        shape = f"Hidden size {row['hidden_size']}, layers: {row['layers']}, {row['dtype']}"
        cells = shapes.setdefault(shape, {}).setdefault(row["name"], {"name": row["name"]})
        phase = row["phase"]
        cells[f"{phase} (s)"] = _spread(row, options.repetitions)
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
