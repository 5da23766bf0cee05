"""Calibration of every method over several tasks, from the files of other runs."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from cycler import cycler
from matplotlib.figure import Figure

from benchmarks.options import Overview
from benchmarks.report import Lines, Result, Row, cell, label, records, save, table

COUNTS = (1, 2, 3, 5)  # of members
COLUMNS = ["accuracy", "nll", "ece", "regret", "trainings", "forward_passes"]
COLUMNS += ["fit_seconds", "predict_seconds"]
FILES = ("calibration.json", "stages.json")
SPANS = ["regret", "fit_seconds", "predict_seconds"]
# What diagrams and overviews show of each method: its key, prior and link.
KEYS = ("method", "prior", "link")
ONE_BY_ONE = ("mc_dropout", "checkpoint_ensemble", "deep_ensemble", "tfb", "blob", "ivon")
SHOWN = (
    *((key, "", "") for key in ("map", *ONE_BY_ONE)),
    ("kron", "marglik_layerwise", "probit"),
    *(("lowrank_kron", prior, "mean_field") for prior in ("marglik_scalar", "tfb_rule")),
    *(("lowrank_kron", prior, "mean_field") for prior in ("agreement", "validation_elsewhere")),
    ("second_mixture", "validation_elsewhere", "mean_field"),
    *(("temperature_scaling", prior, "") for prior in ("validation", "validation_elsewhere")),
    *((f"staged_map_{n}", prior, "") for n in COUNTS for prior in ("", "held_out_temperature")),
    ("label_smoothing", "held_out", ""),
    ("staged_map_1_student", "swapped", ""),
    *((f"staged_{n}", "held_out", "mean_field") for n in COUNTS),
    *((f"staged_{n}_amortized", "swapped", "mean_field") for n in COUNTS),
    *((f"staged_{n}_student", "swapped", "") for n in COUNTS),
)
PANELS = {"nll": "NLL above the least of the task", "ece": "ECE"}


def run(options: Overview) -> Iterator[Result]:
    """Read the runs; then draw."""
    frame: Any = pd.concat([read(folder) for folder in options.runs], ignore_index=True)
    frame = frame.drop_duplicates(["name", "task", "seed"])  # MAP is in every run
    rows = frame.groupby(["name", "task"], sort=False)[COLUMNS].mean().reset_index()
    of_all = rows.groupby("name", sort=False)[COLUMNS].mean().reset_index()
    seeds = {task: sorted(set(of.seed)) for task, of in frame.groupby("task", sort=False)}
    parts = [table(records(of_all), ["name", *COLUMNS])]
    for task, of_task in rows.groupby("task", sort=False):
        parts.append(f"{task}, seeds {', '.join(map(str, seeds[task]))}:")
        parts.append(table(of_task.to_dict("records"), ["name", *COLUMNS]))
    against = run_by_run(frame, options.ours)
    parts += [f"{options.ours}, against each method run by run:", table(against)]
    figures = {"tasks": records(rows), "all": records(of_all), "seeds": seeds, "against": against}
    yield figures, parts
    draw(rows, options.output / "overview.png")
    draw_costs(over_cost(rows), options.output / "costs.png")


def run_by_run(frame: Any, ours: str) -> list[Row]:
    """In how many runs our NLL and ECE are lower than each method's, and what all runs lie within.

    Differences of accuracy are ours less the other's.
    """
    own, rows = frame[frame["name"] == ours], []
    for name, other in frame.groupby("name", sort=False):
        both = own.merge(other, on=["task", "seed"], suffixes=("", "_other"))
        row: Row = {"name": name, "runs": len(both)}
        for key in ("nll", "ece"):
            row[f"lower_{key}"] = int((both[key] < both[f"{key}_other"]).sum())
        row["accuracy_difference"] = span(both["accuracy"] - both["accuracy_other"])
        rows.append(row | {key: span(other[key]) for key in SPANS})
    return rows


def span(values: Any) -> str | None:
    """Least and largest of some numbers in words."""
    known = values.dropna()
    return None if known.empty else f"{cell(known.min())} to {cell(known.max())}"


def read(folder: Path) -> Any:
    """The rows to show from a run of `calibration` or `stages`, with the task's name."""
    (file,) = (folder / name for name in FILES if (folder / name).exists())
    figures = json.loads(file.read_text(encoding="utf-8"))
    rows = shown(figures["methods"])
    frame = pd.DataFrame(rows).assign(
        name=[label(row) for row in rows], task=figures["task"]["name"]
    )
    return frame.reindex(columns=["name", "task", "seed", *COLUMNS])


def shown(rows: Sequence[Row]) -> list[Row]:
    """Rows that belong in diagrams and overviews, in the order of `SHOWN`."""
    return [row for keys in SHOWN for row in rows if tuple(row[key] for key in KEYS) == keys]


def over_cost(rows: Any) -> Lines:
    """NLL over the forward passes of a prediction, a point for each method."""
    above = rows.assign(nll=rows["nll"] - rows.groupby("task")["nll"].transform("min"))
    means = above.groupby("name", sort=False)[["forward_passes", "nll"]].mean().dropna()
    return {str(name): ([x], [y]) for name, x, y in means.itertuples()}


def draw_costs(points: Lines, path: Path) -> None:
    """Draw a point for each method: how good it is over what a prediction costs."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    panel = figure.subplots()
    colours: Any = matplotlib.colormaps["tab10"]
    panel.set_prop_cycle(cycler(marker=["o", "^", "s", "x"]) * cycler(color=colours.colors))
    for name, (passes, nll) in points.items():
        panel.plot(passes, nll, linestyle="", label=name)
    panel.set(xlabel="Forward passes of a prediction", ylabel=PANELS["nll"])
    save(figure, path, panel)


def draw(rows: Any, path: Path) -> None:
    """Draw NLL and ECE of every method in two panels, a mark per task."""
    figure = Figure(figsize=(10, 0.3 * rows["name"].nunique() + 1.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, (key, title) in zip(panels, PANELS.items(), strict=True):
        least = rows.groupby("task")[key].transform("min") if key == "nll" else 0.0
        drawn = rows.assign(value=rows[key] - least)
        for task, of_task in drawn.groupby("task", sort=False):
            panel.plot(of_task["value"], of_task["name"], "o", label=task)
        means = drawn.groupby("name", sort=False)["value"].mean()
        panel.plot(means, means.index, "k|", markersize=14, label="mean")
        panel.set(xlabel=title, xlim=(0, None))
        panel.grid(axis="y", alpha=0.3)
    panels[0].invert_yaxis()
    save(figure, path, panels[0])
