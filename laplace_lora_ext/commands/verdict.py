"""What results mean, in figures and in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from laplace_lora_ext.metrics import quality
from laplace_lora_ext.plots import POSTERIOR, TEMPERATURE, TRAINED, Outcomes, log_of
from laplace_lora_ext.predictive.predictions import Prediction

_MEASURES = ("accuracy", "nll", "ece", "brier")
HEADER = ("", "accuracy", "NLL", "ECE", "Brier")
UNITS = (
    "Higher accuracy is better; lower NLL (nats a text), ECE (0 to 1) and Brier score "
    "(0 to 2) are better. A * marks the best."
)


def figures_of(results: Outcomes) -> list[list[str]]:
    """Write a row of figures for each of those that predict, the best marked."""
    rows: list[list[str]] = [[name] for name in results.probabilities]
    figures = [quality(p, results.labels) for p in results.probabilities.values()]
    for measure in _MEASURES:
        cells = [f"{each[measure]:.3f}" for each in figures]
        best = max(cells) if measure == "accuracy" else min(cells, key=float)
        for row, cell in zip(rows, cells, strict=True):
            row.append(f"{cell}*" if cell == best else cell)
    return rows


def as_text(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay a table out in columns."""
    columns = zip(header, *rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in [header, *rows]:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def verdict(results: Outcomes, logit_scale: float) -> str:
    """Say what the posterior is worth, for somebody in a hurry.

    `logit_scale` is the posterior's.
    """
    sureness = {
        name: p.max(-1).values.mean().item()
        for name, p in results.probabilities.items()
    }
    is_right = results.prediction.labels == results.labels
    share = is_right.double().mean().item()
    first = (
        f"{share:.0%} of the answers are right: the trained model claims "
        f"{sureness[TRAINED]:.0%}, the posterior {sureness[POSTERIOR]:.0%}. "
    )
    if not results.prediction.epistemic_entropy.any():
        return first + (
            f"No variance was chosen: the posterior is a temperature of "
            f"{1 / logit_scale:.2g}, and tells no doubt about the weights."
        )
    if results.temperature is None:
        return first + "No temperature was chosen to compare it with."

    def log_p_of_labels(name: str) -> Tensor:
        log_p = log_of(results.probabilities[name])
        return log_p.gather(1, results.labels[:, None])[:, 0]

    gain = log_p_of_labels(POSTERIOR) - log_p_of_labels(TEMPERATURE)
    mean = gain.mean().item()
    error = (gain.var(correction=0) / (len(gain) - 1)).sqrt().item()
    # The error of a single text is not a number.
    if not abs(mean) > 2 * error:
        return first + "A temperature does as well on these texts."
    better, worse = (POSTERIOR, TEMPERATURE) if mean > 0 else (TEMPERATURE, POSTERIOR)
    return first + (
        f"The {better} is better than the {worse} by {abs(mean):.3f} ± "
        f"{error:.3f} nats a text."
    )


def reason(prediction: Prediction, place: int, class_names: Sequence[str]) -> str:
    """Say between which classes a text is, and what the doubt is about."""
    p, classes = prediction.probabilities[place].topk(2)
    (first, second), (p_first, p_second) = classes.tolist(), p.tolist()
    epistemic = prediction.epistemic_entropy[place].item()
    share = epistemic / prediction.total_entropy[place].clamp_min(1e-12).item()
    text = (
        f"{class_names[first]} ({p_first:.0%}) or {class_names[second]} "
        f"({p_second:.0%})"
    )
    if not epistemic:
        return text
    if share < 0.5:
        return f"{text}: {1 - share:.0%} of the doubt is about the text"
    return (
        f"{text}: {share:.0%} of the doubt is about the weights, and more such labels "
        "would lessen it"
    )
