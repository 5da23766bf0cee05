"""Tables and diagrams of the calibration experiment."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.metrics import COVERAGES
from benchmarks.report import Figures, Row, draw_reliability, hardware_of, label, save, table

WHOLE, SPLIT = "whole training set", "80/20 split"
IDENTITY = ["name", "protocol", "chosen_by", "link"]
PREFERRED = "preferred"  # the link of a method that a seed's validation data prefer
ENSEMBLES = ("map", "mc_dropout", "checkpoint_ensemble", "deep_ensemble", "tfb", "blob", "ivon")
FIGURES = ["accuracy", "nll", "ece", "calibrated_ece", "brier", "away_from_map"]
FIGURES += ["fit_seconds", "predict_seconds"]
# The rows that diagrams show: rivals, the paper's choices, and the library's.
DRAWN = {
    *((WHOLE, key, "", "") for key in ENSEMBLES),
    (WHOLE, "last_layer", "evidence, layerwise", "probit"),
    (WHOLE, "lowrank_kron_paper", "evidence, scalar", "mc"),
    (WHOLE, "lowrank_kron", "evidence, scalar", "mc"),
    (WHOLE, "lowrank_kron", "linearized evidence, layerwise", "mc"),
    (WHOLE, "lowrank_kron", "linearized evidence, layerwise", "probit"),
    (WHOLE, "lowrank_kron", "leave-one-out, scalar", "mean field"),
    (WHOLE, "lowrank_kron", "agreement", "mean field"),
    (SPLIT, "temperature_scaling", "validation", ""),
    (SPLIT, "lowrank_kron", "validation, factor of linearized evidence", "mean field"),
}


def text_of(figures: Figures) -> str:
    """Everything that has been measured so far, in words and tables."""
    rows, task = figures["methods"], figures["task"]
    seeds = ", ".join(str(seed) for seed in sorted({row["seed"] for row in rows}))
    shifted = ", ".join(f"{count} of {name}" for name, count in task["shifted"].items())
    summary = summarize(rows)
    cells = pd.DataFrame(index=summary.index)
    for name in summary.columns.get_level_values(0).unique():
        means, deviations = (summary[name, each].map("{:.3f}".format) for each in ("mean", "std"))
        cells[name] = means + " ± " + deviations if "," in seeds else means
    parts = [
        f"Task {task['name']}: {figures['hyperparameters']['model']} with LoRA, {task['train']} "
        f"training texts, {task['test']} test texts, {len(task['classes'])} classes; shifted "
        f"texts: {shifted or 'none'}. Seeds: {seeds}; mean ± standard deviation of several. "
        f"{hardware_of(figures)}.",
        table(cells.reset_index().to_dict("records"), [*IDENTITY, *cells]),
        f"Test texts of seed {rows[0]['seed']}, from the smallest margin of the top logit to the "
        "largest, with the squared norm of the margin's Jacobian:",
        table(figures["jacobians_by_margin"], ["margin", "squared_norm", "accuracy"]),
    ]
    return "\n\n".join(parts)


def summarize(rows: Sequence[Row]) -> pd.DataFrame:
    """Mean and deviation over the seeds of each method, choice and link, `PREFERRED` ones too."""
    frame = pd.DataFrame(rows)
    aurocs = {f"AUROC of {name}": name for name in rows[0]["shifted"]}
    for title, name in aurocs.items():
        frame[title] = [row["shifted"][name]["shift_auroc"] for row in rows]
    preferred = frame[frame["is_choice"]].assign(link=PREFERRED)
    # A method's preferred link stands where its rows of the same way of choosing first have one.
    frame = pd.concat([frame, preferred]).sort_index(kind="stable")
    groups = frame.groupby(IDENTITY, sort=False)[[*FIGURES, *aurocs]]
    return groups.agg(["mean", "std"]).fillna(0.0)


def draw(figures: Figures, folder: Path) -> None:
    """Draw the diagrams of the first seed."""

    def drawn(rows: Sequence[Row]) -> list[Row]:
        keys = ("protocol", "method", "chosen_by", "link")
        return [row for row in rows if tuple(row[key] for key in keys) in DRAWN]

    rows, along = figures["methods"], drawn(figures["along_training"])
    first = drawn([row for row in rows if row["seed"] == rows[0]["seed"]])
    draw_reliability(first, folder / "calibration_reliability.png")
    if first[0]["shifted"]:
        draw_selective_accuracy(first, folder / "selective_accuracy.png")
    if along:
        draw_along_training(along, folder / "along_training.png")
    figure = Figure(figsize=(8, 3), layout="constrained")
    shares = pd.Series(figures["variance_by_layer"]).rename(lambda name: name.rpartition(".")[2])
    axis = {"xlabel": "Layer", "ylabel": "Share of the test logits' variance"}
    shares.plot.bar(ax=figure.subplots(), **axis)
    save(figure, folder / "layers.png")


def draw_selective_accuracy(rows: Sequence[Row], path: Path) -> None:
    """Draw the accuracy on the most certain of test and shifted texts, one panel a shifted set."""
    names = list(rows[0]["shifted"])
    figure = Figure(figsize=(4.2 * len(names) + 3.2, 3.6), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for panel, name in zip(panels, names, strict=True):
        for row in rows:
            panel.plot(COVERAGES, row["shifted"][name]["selective_accuracy"], label=label(row))
        panel.set(xlabel="Coverage of test and shifted texts", title=name)
    panels[0].set_ylabel("Accuracy on those kept")
    save(figure, path, panels[0])


def draw_along_training(rows: Sequence[Row], path: Path) -> None:
    """Draw accuracy, NLL and ECE against training steps."""
    figure = Figure(figsize=(15, 3.8), layout="constrained")
    panels = figure.subplots(1, 3)
    frame = pd.DataFrame(rows).assign(label=[label(row) for row in rows])
    for panel, key in zip(panels, ("accuracy", "nll", "ece"), strict=True):
        for name, of_method in frame.groupby("label", sort=False):
            panel.plot(of_method["step"], of_method[key], marker="o", label=name)
        panel.set(xlabel="Training steps", ylabel=key)
    save(figure, path, panels[0])
