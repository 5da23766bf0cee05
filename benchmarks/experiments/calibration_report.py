"""Tables and diagrams of the calibration experiment."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.experiments.calibration_trial import SPLIT, WHOLE
from benchmarks.metrics import COVERAGES
from benchmarks.report import Figures, Row, add_legend, draw_reliability, hardware_of, label, table

IDENTITY = ["protocol", "method", "chosen_by", "link"]
PREFERRED = "preferred"  # the link of a method that a seed's validation data prefer
FIGURES = {
    "accuracy": "Accuracy",
    "nll": "NLL",
    "ece": "ECE",
    "calibrated_ece": "ECE if calibrated",
    "brier": "Brier",
    "away_from_map": "Away from MAP",
}
# The rows that diagrams show: rivals, the paper's choices, and the library's.
DRAWN = (
    (WHOLE, "map", "", ""),
    (WHOLE, "mc_dropout", "", ""),
    (WHOLE, "checkpoint_ensemble", "", ""),
    (WHOLE, "deep_ensemble", "", ""),
    (WHOLE, "last_layer", "evidence, layerwise", "probit"),
    (WHOLE, "lowrank_kron_paper", "evidence, scalar", "mc"),
    (WHOLE, "lowrank_kron", "evidence, scalar", "mc"),
    (WHOLE, "lowrank_kron", "linearized evidence, layerwise", "mc"),
    (WHOLE, "lowrank_kron", "linearized evidence, layerwise", "probit"),
    (WHOLE, "lowrank_kron", "leave-one-out, layerwise", "mean field"),
    (SPLIT, "temperature_scaling", "validation", ""),
    (SPLIT, "lowrank_kron", "validation, factor of linearized evidence", "mean field"),
)
MARGIN_COLUMNS = (
    ("margin", "Margin", ".2f"),
    ("squared_norm", "Squared norm of its Jacobian", ".0f"),
    ("accuracy", "Accuracy", ".3f"),
)


def text_of(figures: Figures) -> str:
    """Everything that has been measured so far, in words and tables."""
    rows = figures["methods"]
    return "\n\n".join(
        [
            _headline(figures),
            _table(rows),
            f"Test texts of seed {rows[0]['seed']}, from the smallest margin of the top logit to "
            "the largest:",
            table(figures["jacobians_by_margin"], MARGIN_COLUMNS),
        ]
    )


def draw(figures: Figures, folder: Path) -> None:
    """Draw the diagrams of the first seed."""
    rows = figures["methods"]
    drawn = [row for row in rows if row["seed"] == rows[0]["seed"] and _is_drawn(row)]
    draw_reliability(drawn, folder / "calibration_reliability.png")
    draw_selective_accuracy(drawn, folder / "selective_accuracy.png")
    draw_shares(figures["variance_by_layer"], folder / "layers.png")
    along = [row for row in figures["along_training"] if _is_drawn(row)]
    if along:
        draw_along_training(along, folder / "along_training.png")


def summarize(rows: Sequence[Row]) -> pd.DataFrame:
    """Mean and standard deviation over the seeds of each method, way of choosing and link.

    With the link `PREFERRED`, also of what each seed's validation data prefer. The columns have
    two levels: a figure, and "mean" or "std", which is 0 for a single seed.
    """
    frame = pd.DataFrame(rows)
    for name in rows[0]["shifted"]:
        frame[f"AUROC of {name}"] = [row["shifted"][name]["shift_auroc"] for row in rows]
    preferred = frame[frame["is_choice"]].assign(link=PREFERRED)
    # A method's preferred link stands where its rows of the same way of choosing first have one.
    frame = pd.concat([frame, preferred]).sort_index(kind="stable")
    figures = [name for name in frame if name in FIGURES or str(name).startswith("AUROC")]
    groups = frame.groupby([*IDENTITY, "name"], sort=False)[figures]
    return groups.agg(["mean", "std"]).fillna(0.0)


def draw_selective_accuracy(rows: Sequence[Row], path: Path) -> None:
    """Draw the accuracy on the most certain of test and shifted texts, one panel a shifted set."""
    names = list(rows[0]["shifted"])
    if not names:
        return
    figure = Figure(figsize=(4.2 * len(names) + 3.2, 3.6), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for panel, name in zip(panels, names, strict=True):
        for row in rows:
            panel.plot(COVERAGES, row["shifted"][name]["selective_accuracy"], label=label(row))
        panel.set(xlabel="Coverage of test and shifted texts", title=name)
    panels[0].set_ylabel("Accuracy on those kept")
    add_legend(figure)
    figure.savefig(path, dpi=150)


def draw_along_training(rows: Sequence[Row], path: Path) -> None:
    """Draw accuracy, NLL and ECE against training steps."""
    figure = Figure(figsize=(15, 3.8), layout="constrained")
    panels = figure.subplots(1, 3)
    frame = pd.DataFrame(rows).assign(label=[label(row) for row in rows])
    for name, of_method in frame.groupby("label", sort=False):
        for panel, key in zip(panels, ("accuracy", "nll", "ece"), strict=True):
            panel.plot(of_method["step"], of_method[key], marker="o", label=name)
            panel.set(xlabel="Training steps", ylabel=FIGURES[key])
    add_legend(figure)
    figure.savefig(path, dpi=150)


def draw_shares(shares: dict[str, float], path: Path) -> None:
    """Draw each layer's share in the variance of the logits."""
    figure = Figure(figsize=(6, 0.3 * len(shares) + 1.2), layout="constrained")
    panel = figure.subplots()
    panel.barh([name.rpartition(".")[2] for name in shares], list(shares.values()))
    panel.invert_yaxis()
    panel.set(xlabel="Share of the variance of the test texts' logits", ylabel="Layer")
    figure.savefig(path, dpi=150)


def _is_drawn(row: Row) -> bool:
    return tuple(row[key] for key in IDENTITY) in DRAWN


def _headline(figures: Figures) -> str:
    task, seeds = figures["task"], sorted({row["seed"] for row in figures["methods"]})
    shifted = ", ".join(f"{count} of {name}" for name, count in task["shifted"].items())
    counted = ", ".join(map(str, seeds))
    repeated = (
        f"Seeds {counted}; mean ± standard deviation" if len(seeds) > 1 else f"Seed {counted}"
    )
    return (
        f"Task {task['name']}: {figures['hyperparameters']['model']} with LoRA, {task['train']} "
        f"training texts, {task['test']} test texts, {len(task['classes'])} classes; shifted "
        f"texts: {shifted or 'none'}. {repeated}. {hardware_of(figures)}."
    )


def _table(rows: Sequence[Row]) -> str:
    summary = summarize(rows)
    several = len({row["seed"] for row in rows}) > 1
    figures = summary.columns.get_level_values(0).unique()
    cells = pd.DataFrame(
        {
            name: [
                f"{mean:.3f} ± {deviation:.3f}" if several else f"{mean:.3f}"
                for mean, deviation in summary[name].itertuples(index=False)
            ]
            for name in figures
        },
        index=summary.index,
    ).reset_index()
    columns = [
        ("name", "Method", ""),
        ("protocol", "Data", ""),
        ("chosen_by", "Chosen by", ""),
        ("link", "Link", ""),
        *((name, FIGURES.get(name, name), "") for name in figures),
    ]
    return table(cells.to_dict("records"), columns)
