"""Tables and diagrams of the calibration experiment."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from benchmarks import report
from benchmarks.metrics import COVERAGES
from benchmarks.report import Figures, Row

WHOLE, SPLIT = "whole training set", "80/20 split"
IDENTITY = ["name", "protocol", "chosen_by", "link"]
PREFERRED = "preferred"  # the link that a seed's validation data prefer
FIGURES = ["accuracy", "nll", "ece", "calibrated_ece", "brier", "away_from_map"]
FIGURES += ["fit_seconds", "predict_seconds"]
ENSEMBLES = ("mc_dropout", "checkpoint_ensemble", "deep_ensemble", "tfb", "blob", "ivon")
# What diagrams and overviews show of each method: protocol, method, prior and link, by their keys.
KEYS = ("protocol", "method", "prior", "link")
PRIORS = (
    *("tfb_rule", "marglik_scalar", "agreement"),
    *("validation_elsewhere", "validation_of_several"),
)
SHOWN = (
    *((WHOLE, key, "", "") for key in ("map", *ENSEMBLES)),
    (SPLIT, "temperature_scaling", "validation", ""),
    (WHOLE, "temperature_scaling", "validation_elsewhere", ""),
    (WHOLE, "last_layer", "agreement", "mean_field"),
    (WHOLE, "kron", "marglik_layerwise", "probit"),
    (WHOLE, "lowrank_kron_paper", "marglik_scalar", "mc"),
    *((WHOLE, "lowrank_kron", prior, "mean_field") for prior in PRIORS),
    (SPLIT, "lowrank_kron", "validation_scalar", "mean_field"),
)


def shown(rows: Sequence[Row]) -> list[Row]:
    """Rows that belong in diagrams and overviews, in the order of `SHOWN`."""
    return [row for keys in SHOWN for row in rows if tuple(row[key] for key in KEYS) == keys]


def text_of(figures: Figures) -> list[str]:
    """All that has been measured so far, in words and tables."""
    rows, task = figures["methods"], figures["task"]
    seeds = sorted({row["seed"] for row in rows})
    return [
        f"Task {task['name']}: {figures['hyperparameters']['model']} with LoRA, {task['train']} "
        f"training texts, {task['test']} test texts, {len(task['classes'])} classes; shifted "
        f"texts: {report.counts(task['shifted'])}. Seeds: {', '.join(map(str, seeds))}; mean "
        "± standard deviation of several.",
        report.table(summarize(rows)),
        f"Test texts of seed {rows[0]['seed']}, from the smallest margin of the top logit to the "
        "largest, with the squared norm of the margin's Jacobian:",
        report.table(figures["jacobians_by_margin"], ["margin", "squared_norm", "accuracy"]),
    ]


def summarize(rows: Sequence[Row]) -> list[Row]:
    """Mean ± deviation over the seeds of each method, prior and link, `PREFERRED` ones too."""
    frame = pd.DataFrame(rows)
    aurocs = {f"AUROC of {name}": name for name in rows[0]["shifted"]}
    for title, name in aurocs.items():
        frame[title] = [row["shifted"][name]["shift_auroc"] for row in rows]
    preferred = frame[frame["is_choice"]].assign(link=PREFERRED)
    # The preferred link comes right after the first link that a seed preferred.
    frame = pd.concat([frame, preferred]).sort_index(kind="stable")
    return report.over_seeds(frame, IDENTITY, [*FIGURES, *aurocs])


def draw(figures: Figures, folder: Path) -> None:
    """Draw the diagrams of the first seed."""
    rows, along = figures["methods"], shown(figures["along_training"])
    first = shown([row for row in rows if row["seed"] == rows[0]["seed"]])
    report.draw_reliability(first, folder / "calibration_reliability.png")
    if first[0]["shifted"]:
        panels = {
            f"Accuracy on the surest of test texts and {name}": {
                report.label(row): (COVERAGES, row["shifted"][name]["selective_accuracy"])
                for row in first
            }
            for name in first[0]["shifted"]
        }
        report.draw_lines(folder / "selective_accuracy.png", panels, "Coverage")
    if along:
        along = [{**row, "label": report.label(row)} for row in along]
        keys = ("accuracy", "nll", "ece")
        panels = {key: report.lines(along, "step", key, "label") for key in keys}
        report.draw_lines(folder / "along_training.png", panels, "Training steps")
    report.draw_shares(figures["variance_by_layer"], folder / "layers.png")
