"""Calibration of every method over several tasks, from what `calibration` has written of each."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.experiments.calibration_report import SPLIT, WHOLE
from benchmarks.options import Overview
from benchmarks.report import Figures, save, table, write

# A method with one way to choose its prior and one link, by its protocol.
SHOWN = {
    ("map", "", "", WHOLE): "MAP",
    ("mc_dropout", "", "", WHOLE): "MC dropout",
    ("checkpoint_ensemble", "", "", WHOLE): "Checkpoint ensemble",
    ("deep_ensemble", "", "", WHOLE): "Deep ensemble",
    ("tfb", "", "", WHOLE): "TFB",
    ("blob", "", "", WHOLE): "BLoB",
    ("ivon", "", "", WHOLE): "IVON-LoRA",
    ("temperature_scaling", "validation", "", SPLIT): "Temperature scaling",
    ("last_layer", "leave-one-out, scalar", "mean field", WHOLE): "Last layer, leave-one-out",
    ("lowrank_kron", "TFB's rule", "mean field", WHOLE): "lowrank_kron, TFB's rule",
    ("lowrank_kron", "evidence, scalar", "mean field", WHOLE): "lowrank_kron, evidence",
    ("lowrank_kron", "linearized evidence, scalar", "mean field", WHOLE): (
        "lowrank_kron, linearized evidence"
    ),
    ("lowrank_kron", "leave-one-out, scalar", "mean field", WHOLE): "lowrank_kron, leave-one-out",
    ("lowrank_kron", "leave-one-out, layerwise", "mean field", WHOLE): (
        "lowrank_kron, leave-one-out, layerwise"
    ),
    ("lowrank_kron", "agreement", "mean field", WHOLE): "lowrank_kron, agreement",
}
KEYS = ["method", "chosen_by", "link", "protocol"]
COLUMNS = ["accuracy", "nll", "ece", "regret", "fit_seconds", "predict_seconds"]
PANELS = {"nll": "NLL above the least of the task", "ece": "ECE"}


def run(options: Overview) -> Figures:
    """Read the runs, and write table and diagram."""
    frame: Any = pd.concat([read(folder) for folder in options.runs], ignore_index=True)
    rows = frame.groupby(["name", "task"], sort=False)[COLUMNS].mean().reset_index()
    of_all = rows.groupby("name", sort=False)[COLUMNS].mean().reset_index()
    figures: Figures = {
        "tasks": rows.to_dict("records"),
        "all": of_all.to_dict("records"),
        "seeds": {task: sorted(set(of.seed)) for task, of in frame.groupby("task", sort=False)},
    }
    figures = json.loads(json.dumps(figures).replace("NaN", "null"))
    report = f"{table(figures['all'], ['name', *COLUMNS])}\n\n" + "\n\n".join(
        f"{task}, seeds {', '.join(map(str, seeds))}:\n\n"
        + table([row for row in figures["tasks"] if row["task"] == task], ["name", *COLUMNS])
        for task, seeds in figures["seeds"].items()
    )
    write(options.output, "overview", figures, report)
    draw(rows, options.output / "overview.png")
    return figures


def read(folder: Path) -> Any:
    """The shown rows of a run of `calibration`, with the task's name."""
    figures = json.loads((folder / "calibration.json").read_text(encoding="utf-8"))
    frame: Any = pd.DataFrame(figures["methods"])
    names = [SHOWN.get(tuple(key)) for key in frame[KEYS].itertuples(index=False)]
    frame = frame.assign(name=names, task=figures["task"]["name"])
    order = list(SHOWN.values())
    frame = frame[frame["name"].notna() & ~((frame.method == "map") & (frame.protocol != WHOLE))]
    return frame.sort_values("name", key=lambda column: column.map(order.index), kind="stable")


def draw(rows: Any, path: Path) -> None:
    """Draw NLL and ECE of every method, a mark a task, one panel each."""
    figure = Figure(figsize=(10, 0.3 * rows["name"].nunique() + 1.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, (key, title) in zip(panels, PANELS.items(), strict=True):
        least = rows.groupby("task")[key].transform("min") if key == "nll" else 0.0
        shown = rows.assign(value=rows[key] - least)
        for task, of_task in shown.groupby("task", sort=False):
            panel.plot(of_task["value"], of_task["name"], "o", label=task)
        means = shown.groupby("name", sort=False)["value"].mean()
        panel.plot(means, means.index, "k|", markersize=14, label="mean")
        panel.set(xlabel=title, xlim=(0, None))
        panel.grid(axis="y", alpha=0.3)
    panels[0].invert_yaxis()
    save(figure, path, panels[0])
