"""Tables and figures of the calibration benchmark."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.figure import Figure

from benchmarks.calibration.protocols import PREFERRED, SPLIT, WHOLE
from benchmarks.metrics import COVERAGES
from benchmarks.report import draw_reliability, markdown_table, write_figures

IDENTITY = ("protocol", "method", "chosen_by", "link")
FIGURES = {
    "accuracy": "Accuracy",
    "nll": "NLL",
    "ece": "ECE",
    "calibrated_ece": "ECE if calibrated",
    "brier": "Brier",
    "away_from_map": "Away from MAP",
}
# The rows that figures show: rivals, the paper's choices, and the library's.
DRAWN = (
    (WHOLE, "MAP", "", ""),
    (WHOLE, "MC dropout", "", ""),
    (WHOLE, "Checkpoint ensemble", "", ""),
    (WHOLE, "Deep ensemble", "", ""),
    (WHOLE, "Last layer (LLLA)", "evidence, layerwise", "probit"),
    (WHOLE, "lowrank_kron (paper)", "evidence, scalar", "mc"),
    (WHOLE, "lowrank_kron", "evidence, scalar", "mc"),
    (WHOLE, "lowrank_kron", "linearized evidence, layerwise", "mc"),
    (WHOLE, "lowrank_kron", "linearized evidence, layerwise", "probit"),
    (WHOLE, "lowrank_kron", "leave-one-out, layerwise", "mean field"),
    (SPLIT, "Temperature scaling", "validation", ""),
    (SPLIT, "lowrank_kron", "validation, factor of linearized evidence", "mean field"),
)

MARGIN_COLUMNS = (
    ("margin", "Margin", "{:.2f}"),
    ("squared_norm", "Squared norm of its Jacobian", "{:.0f}"),
    ("accuracy", "Accuracy", "{:.3f}"),
)


def write_report(figures: dict[str, Any], folder: Path) -> str:
    """Write calibration.json, calibration.md and the figures.

    Parameters
    ----------
    figures : dict
        What `calibrate` has measured so far.
    folder : Path
        Folder to write to.

    Returns
    -------
    report : str
        Text of calibration.md.
    """
    rows = figures["methods"]
    seeds = sorted({row["seed"] for row in rows})
    parts = [
        _headline(figures, seeds),
        _table(summarize(rows), len(seeds) > 1),
        f"Test texts of seed {seeds[0]}, from the smallest margin of the top logit to the largest:",
        markdown_table(figures["jacobians_by_margin"], MARGIN_COLUMNS),
    ]
    report = "\n\n".join(parts) + "\n"
    (folder / "calibration.md").write_text(report, encoding="utf-8")
    drawn = [row for row in rows if row["seed"] == rows[0]["seed"] and _identity(row) in DRAWN]
    draw_reliability(
        [row | {"name": _label(row)} for row in drawn], folder / "calibration_reliability.png"
    )
    draw_selective_accuracy(drawn, folder / "selective_accuracy.png")
    draw_shares(figures["variance_by_layer"], folder / "layers.png")
    along = [row for row in figures["along_training"] if _identity(row) in DRAWN]
    if along:
        draw_along_training(along, folder / "along_training.png")
    write_figures(figures, folder / "calibration.json")
    return report


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation over the seeds of each method's figures.

    Parameters
    ----------
    rows : sequence of dict
        Figures of one method with one way of choosing, one link and one seed each.

    Returns
    -------
    summary : list of dict
        One for each method, way of choosing and link, in the order of the rows; and, with the
        link `PREFERRED`, one of what each seed's validation data prefer.
    """
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(_identity(row), []).append(row)
        if row["is_choice"]:
            groups.setdefault((*_identity(row)[:-1], PREFERRED), []).append(row)
    return [
        dict(zip(IDENTITY, identity, strict=True))
        | {name: spread([row[name] for row in group]) for name in FIGURES}
        | {
            f"auroc {name}": spread([row["shifted"][name]["shift_auroc"] for row in group])
            for name in group[0]["shifted"]
        }
        for identity, group in groups.items()
    ]


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation, which is 0 for a single value."""
    return mean(values), stdev(values) if len(values) > 1 else 0.0


def draw_selective_accuracy(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the accuracy on the most certain of test and shifted texts, one panel a shifted set.

    Parameters
    ----------
    rows : sequence of dict
        Methods with their ``shifted`` sets.
    path : Path
        PNG file to write; none where there is no shifted set.
    """
    names = list(rows[0]["shifted"])
    if not names:
        return
    figure = Figure(figsize=(4.2 * len(names) + 3.2, 3.6), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for panel, name in zip(panels, names, strict=True):
        for row in rows:
            panel.plot(COVERAGES, row["shifted"][name]["selective_accuracy"], label=_label(row))
        panel.set(xlabel="Coverage of test and shifted texts", title=name)
    panels[0].set_ylabel("Accuracy on those kept")
    _add_legend(figure)
    figure.savefig(path, dpi=150)


def draw_along_training(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw accuracy, NLL and ECE against training steps.

    Parameters
    ----------
    rows : sequence of dict
        Figures of a method at a step each.
    path : Path
        PNG file to write.
    """
    figure = Figure(figsize=(15, 3.8), layout="constrained")
    panels = figure.subplots(1, 3)
    for label in dict.fromkeys(_label(row) for row in rows):
        of_method = [row for row in rows if _label(row) == label]
        steps = [row["step"] for row in of_method]
        for panel, name in zip(panels, ("accuracy", "nll", "ece"), strict=True):
            panel.plot(steps, [row[name] for row in of_method], marker="o", label=label)
            panel.set(xlabel="Training steps", ylabel=FIGURES[name])
    _add_legend(figure)
    figure.savefig(path, dpi=150)


def draw_shares(shares: dict[str, float], path: Path) -> None:
    """Draw each layer's share in the variance of the logits.

    Parameters
    ----------
    shares : dict
        Share by the layer's name.
    path : Path
        PNG file to write.
    """
    figure = Figure(figsize=(6, 0.3 * len(shares) + 1.2), layout="constrained")
    panel = figure.subplots()
    panel.barh([name.rpartition(".")[2] for name in shares], list(shares.values()))
    panel.invert_yaxis()
    panel.set(xlabel="Share of the variance of the test texts' logits", ylabel="Layer")
    figure.savefig(path, dpi=150)


def _add_legend(figure: Figure) -> None:
    handles, labels = figure.axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)


def _identity(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(row[key] for key in IDENTITY)


def _label(row: dict[str, Any]) -> str:
    return ", ".join(row[key] for key in IDENTITY[1:] if row[key])


def _headline(figures: dict[str, Any], seeds: Sequence[int]) -> str:
    task, machine = figures["task"], figures["machine"]
    shifted = ", ".join(f"{count} of {name}" for name, count in task["shifted"].items())
    counted = ", ".join(map(str, seeds))
    repeated = (
        f"Seeds {counted}; mean ± standard deviation" if len(seeds) > 1 else f"Seed {counted}"
    )
    return (
        f"Task {task['name']}: {figures['hyperparameters']['model']} with LoRA, {task['train']} "
        f"training texts, {task['test']} test texts, {len(task['classes'])} classes; shifted "
        f"texts: {shifted or 'none'}. {repeated}. "
        f"{machine['accelerator'] or machine['processor']}."
    )


def _table(summary: Sequence[dict[str, Any]], with_deviations: bool) -> str:
    names = [name for name in summary[0] if name not in IDENTITY]
    columns = [
        ("method", "Method", "{}"),
        ("protocol", "Data", "{}"),
        ("chosen_by", "Chosen by", "{}"),
        ("link", "Link", "{}"),
        *((name, FIGURES.get(name, name.replace("auroc", "AUROC of")), "{}") for name in names),
    ]
    form = "{:.3f} ± {:.3f}" if with_deviations else "{:.3f}"
    cells = [row | {name: form.format(*row[name]) for name in names} for row in summary]
    return markdown_table(cells, columns)
