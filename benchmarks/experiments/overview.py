"""Calibration of every method over several tasks, from the files of other runs."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from benchmarks.methods import METHODS
from benchmarks.methods.method import Posterior
from benchmarks.options import Overview
from benchmarks.report import (
    Figures,
    Frame,
    Result,
    Row,
    as_frame,
    cell,
    label,
    records,
    table,
)

COUNTS = (1, 2, 3, 5)  # of members
COLUMNS = [
    "accuracy",
    "nll",
    "ece",
    "regret",
    "trainings",
    "forward_passes",
    "megabytes",
    "fit_seconds",
    "predict_seconds",
]
RUN = ["task", "texts", "seed"]  # trained on other numbers of texts, it is another
FILES = ("calibration.json", "stages.json")
SPANS = ("regret", "fit_seconds", "predict_seconds")


class Keys(NamedTuple):
    """What a row is: the keys of its method, its prior and its link."""

    method: str
    prior: str = ""
    link: str = ""


def run(options: Overview) -> Iterator[Result]:
    """Read the runs."""
    frame = read_all(options.runs)
    over_seeds = frame.groupby(["name", "task"], sort=False)
    of_tasks = over_seeds[COLUMNS].mean().reset_index()
    # Every task counts alike, whatever the number of its seeds.
    over_tasks = of_tasks.groupby("name", sort=False)
    of_all = over_tasks[COLUMNS].mean().reset_index()
    shown_columns = ["name", *COLUMNS]
    parts = [table(records(of_all), shown_columns)]
    seeds = {}
    for task, rows in frame.groupby("task", sort=False):
        seeds[task] = sorted(set(rows["seed"]))
    for task, rows in of_tasks.groupby("task", sort=False):
        listed = ", ".join(str(seed) for seed in seeds[task])
        parts.append(f"{task}, seeds {listed}:")
        parts.append(table(rows.to_dict("records"), shown_columns))
    against = run_by_run(frame, options.ours)
    parts.append(f"{options.ours}, against each method run by run:")
    parts.append(table(against))
    figures = {
        "tasks": records(of_tasks),
        "all": records(of_all),
        "seeds": seeds,
        "against": against,
    }
    yield figures, parts


def run_by_run(frame: Frame, ours: str) -> list[Row]:
    """Count in how many runs our NLL and ECE are lower than each method's.

    Differences are ours less the other's: their median and maximum over runs, and the
    mean of tasks with its standard error. Of other figures all runs lie within a span.
    """
    of_ours = frame[frame["name"] == ours]
    rows = []
    for name, other in frame.groupby("name", sort=False):
        # Only runs that have both: not every run has every method.
        both = of_ours.merge(other, on=RUN, suffixes=("", "_other"))
        has_lower_nll = both["nll"] < both["nll_other"]
        has_lower_ece = both["ece"] < both["ece_other"]
        differences = both["accuracy"] - both["accuracy_other"]
        nll_differences = both["nll"] - both["nll_other"]
        of_tasks = nll_differences.groupby(both["task"]).mean()
        row: Row = {
            "name": name,
            "runs": len(both),
            "lower_nll": int(has_lower_nll.sum()),
            "median_nll_difference": float(nll_differences.median()),
            "highest_nll_difference": float(nll_differences.max()),
            "nll_difference": float(of_tasks.mean()),
            "nll_difference_error": float(of_tasks.sem()),
            "lower_ece": int(has_lower_ece.sum()),
            "accuracy_difference": span(differences),
        }
        for key in SPANS:
            row[key] = span(other[key])
        rows.append(row)
    return rows


def span(values: Frame) -> str | None:
    """Put least and largest of some numbers in words."""
    known = values.dropna()
    if known.empty:
        return None
    return f"{cell(known.min())} to {cell(known.max())}"


def read_all(folders: Sequence[Path]) -> Frame:
    """Read the rows to show from several runs, each once: MAP is in every run."""
    frame = pd.concat([read(folder) for folder in folders], ignore_index=True)
    return frame.drop_duplicates(["name", *RUN])


def read(folder: Path) -> Frame:
    """Read rows to show, and the task, from a run of `calibration` or `stages`."""
    figures = read_figures(folder)
    rows = shown(figures["methods"])
    task = figures["task"]
    frame = as_frame(rows).assign(
        name=[label(row) for row in rows], task=task["name"], texts=task["train"]
    )
    # Not every experiment measures every column.
    return frame.reindex(columns=["name", *RUN, *COLUMNS])


def read_figures(folder: Path) -> Figures:
    """Read what a run of `calibration` or `stages` has written."""
    candidates = [folder / name for name in FILES]
    (file,) = [candidate for candidate in candidates if candidate.exists()]
    content = file.read_text(encoding="utf-8")
    return json.loads(content)


def shown(rows: Sequence[Row]) -> list[Row]:
    """Keep rows that belong in overviews, methods of the list first."""
    return sorted(filter(_is_shown, rows), key=_place)


def _is_shown(row: Row) -> bool:
    """Tell whether a row is shown: of a posterior with many priors, a few."""
    method = METHODS.get(row["method"])
    if isinstance(method, Posterior):
        return (row["prior"], row["link"]) in method.shown
    return row["prior"] != "held_out_prior"


def _place(row: Row) -> int:
    """Number the methods of the list; what others train comes behind, as it came."""
    keys = list(METHODS)
    return keys.index(row["method"]) if row["method"] in METHODS else len(keys)


def keys_of(row: Row) -> Keys:
    """Return what a row is."""
    return Keys(row["method"], row["prior"], row["link"])
