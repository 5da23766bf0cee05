"""Calibration of every method over several tasks, from the files of other runs."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import pandas as pd
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.methods import METHODS
from benchmarks.methods.method import Posterior
from benchmarks.options import Overview
from benchmarks.report import (
    Figures,
    Frame,
    Line,
    Lines,
    Result,
    Row,
    as_frame,
    cell,
    explain_beside,
    label,
    records,
    save,
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
    "fit_seconds",
    "predict_seconds",
]
RUN = ["task", "seed"]
FILES = ("calibration.json", "stages.json")
SPANS = ("regret", "fit_seconds", "predict_seconds")
PANELS = {"nll": "NLL above the least of the task", "ece": "ECE"}


class Keys(NamedTuple):
    """What a row is: the keys of its method, its prior and its link."""

    method: str
    prior: str = ""
    link: str = ""


def run(options: Overview) -> Iterator[Result]:
    """Read the runs; then draw."""
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
    # After the figures, which make the folder.
    draw(of_tasks, options.output / "overview.png")
    draw_costs(over_cost(of_tasks), options.output / "costs.png")


def run_by_run(frame: Frame, ours: str) -> list[Row]:
    """Count in how many runs our NLL and ECE are lower than each method's.

    Differences are ours less the other's; of other figures all runs lie within a span.
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
        row: Row = {
            "name": name,
            "runs": len(both),
            "lower_nll": int(has_lower_nll.sum()),
            "median_nll_difference": float(nll_differences.median()),
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
    frame = as_frame(rows).assign(
        name=[label(row) for row in rows], task=figures["task"]["name"]
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
    """Keep rows that belong in diagrams and overviews, methods of the list first."""
    return sorted(filter(_is_shown, rows), key=_place)


def _is_shown(row: Row) -> bool:
    """Tell whether a row is shown: of a posterior with many priors, a few."""
    method = METHODS.get(row["method"])
    if isinstance(method, Posterior):
        return (row["prior"], row["link"]) in method.shown
    return row["prior"] not in ("held_out_prior", "held_out_penalised")


def _place(row: Row) -> int:
    """Number the methods of the list; what others train comes behind, as it came."""
    keys = list(METHODS)
    return keys.index(row["method"]) if row["method"] in METHODS else len(keys)


def keys_of(row: Row) -> Keys:
    """Return what a row is."""
    return Keys(row["method"], row["prior"], row["link"])


def over_cost(rows: Frame) -> Lines:
    """Find NLL and forward passes of a prediction, a point for each method."""
    above = rows.assign(nll=above_the_least(rows))
    by_method = above.groupby("name", sort=False)
    means = by_method[["forward_passes", "nll"]].mean()
    points = {}
    # A method whose costs were not measured has no place in the diagram.
    for name, passes, nll in means.dropna().itertuples():
        points[str(name)] = Line([passes], [nll])
    return points


def above_the_least(rows: Frame) -> Frame:
    """Subtract from each NLL the least one of its task.

    Tasks differ in how hard they are; what counts is how far a method is from the best.
    """
    nll = rows["nll"]
    return nll - rows.groupby("task")["nll"].transform("min")


def draw_costs(points: Lines, path: Path) -> None:
    """Draw a point for each method: how good it is over what a prediction costs."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    panel = figure.subplots()
    colours = matplotlib.color_sequences["tab10"]
    # There are more methods than colours: the next ones have another mark.
    marks = cycler(marker=["o", "^", "s", "x"])
    panel.set_prop_cycle(marks * cycler(color=colours))
    for name, point in points.items():
        panel.plot(point.x, point.y, linestyle="", label=name)
    panel.set(xlabel="Forward passes of a prediction", ylabel=PANELS["nll"])
    explain_beside(figure, [panel])
    save(figure, path)


def draw(rows: Frame, path: Path) -> None:
    """Draw NLL and ECE of every method in two panels, a mark per task."""
    # In inches: a line of text for each method, below a title.
    height = 0.3 * rows["name"].nunique() + 1.5
    figure = Figure(figsize=(10, height), layout="constrained")
    nll, ece = figure.subplots(1, 2, sharey=True)
    above = rows.assign(nll=above_the_least(rows))
    _draw_marks(nll, above, "nll")
    _draw_marks(ece, rows, "ece")
    # Tables begin at the top.
    nll.invert_yaxis()
    explain_beside(figure, [nll])
    save(figure, path)


def _draw_marks(panel: Axes, rows: Frame, figure: str) -> None:
    """Draw a figure of every method, and its mean over the tasks."""
    for task, of_task in rows.groupby("task", sort=False):
        panel.plot(of_task[figure], of_task["name"], "o", label=task)
    means = rows.groupby("name", sort=False)[figure].mean()
    panel.plot(means, means.index, "k|", markersize=14, label="mean")
    panel.set(xlabel=PANELS[figure], xlim=(0, None))
    panel.grid(axis="y", alpha=0.3)
