"""What results mean: in figures, in sentences, and as one page of HTML."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from html import escape
from textwrap import shorten
from typing import Any

from laplace_lora_ext import plots
from laplace_lora_ext.metrics import quality
from laplace_lora_ext.plots import POSTERIOR, TEMPERATURE, Outcomes, log_of
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


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """Lay figures out in columns, whose names are the first row."""
    lines = []
    for name, *cells in rows:
        columns = "".join(f"{cell:<10}" for cell in cells)
        lines.append(f"{name:<15}{columns.rstrip()}")
    return "\n".join(lines)


def verdict(results: Outcomes, logit_scale: float) -> str:
    """Say what the posterior is worth, for somebody in a hurry.

    `logit_scale` is the posterior's.
    """
    prediction = results.prediction
    claims = results.trained.amax(-1).mean().item()
    claims_after = prediction.probabilities.amax(-1).mean().item()
    is_right = prediction.labels == results.labels
    share = is_right.double().mean().item()
    first = (
        f"{share:.0%} of the answers are right: the trained model claims "
        f"{claims:.0%}, the posterior {claims_after:.0%}. "
    )
    if not prediction.epistemic_entropy.any():
        return first + (
            f"No variance was chosen: the posterior is a temperature of "
            f"{1 / logit_scale:.2g}, and tells no doubt about the weights."
        )
    if results.temperature is None:
        return first + "No temperature was chosen to compare it with."
    of_temperature = log_of(results.probabilities[TEMPERATURE])
    differences = log_of(prediction.probabilities) - of_temperature
    gain = differences.gather(1, results.labels[:, None])
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
    text = (
        f"{class_names[first]} ({p_first:.0%}) or {class_names[second]} "
        f"({p_second:.0%})"
    )
    if not epistemic:
        return text
    share = epistemic / prediction.total_entropy[place].item()
    if share < 0.5:
        return f"{text}: {1 - share:.0%} of the doubt is about the text"
    return (
        f"{text}: {share:.0%} of the doubt is about the weights, and more such labels "
        "would lessen it"
    )


# --- a page that needs no other file -------------------------------------------------

# On a phone each cell of a table stands in a line of its own, with its column's name.
_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 70rem;
       padding: 1rem;
       color: #222; background: #fff; }
h1, h2 { line-height: 1.2; }
.verdict { font-size: 1.2em; }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem; margin-top: 1.5rem; }
.pictures figure { flex: 1 1 18rem; margin: 0; min-width: 0; }
.pictures svg { width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .3rem .6rem; text-align: left; border-bottom: 1px solid #ddd;
         vertical-align: top; }
.wrong { color: #b00; }
@media (max-width: 40rem) {
  th { display: none; }
  tr { display: block; border-bottom: 2px solid #888; }
  td { display: block; border: 0; overflow-wrap: anywhere; }
  td:not([data-column=""])::before { content: attr(data-column) ": "; color: #666; }
}
"""
# Captions, and what draws each picture.
_PICTURES: dict[str, Callable[..., Any]] = {
    "How often answers are right, by how sure they are": plots.reliability,
    "Errors among the surest answers": plots.risk_coverage,
}
_SHOWN = 20  # texts in the table
_LENGTH = 240  # of each


def page(
    title: str,
    verdict: str,
    results: Outcomes,
    texts: list[str],
    class_names: Sequence[str],
) -> str:
    """Write the page: a whole HTML document."""
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="verdict">{escape(verdict)}</p>',
        f"<p>{len(texts):,} texts, {len(class_names)} classes.</p>",
        _table(HEADER, figures_of(results)),
        f"<p>{UNITS}</p>",
        '<div class="pictures">',
        *(_figure(caption, draw, results) for caption, draw in _PICTURES.items()),
        "</div>",
        "<h2>Texts to look at first</h2>",
        "<p>Those whose answers are most likely to be wrong.</p>",
        _texts_table(results, texts, class_names),
    ]
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table of cells that are HTML already."""
    head = "".join(f"<th>{name}</th>" for name in header)
    body = ""
    for row in rows:
        cells = zip(header, row, strict=True)
        body += "<tr>"
        body += "".join(f'<td data-column="{name}">{cell}</td>' for name, cell in cells)
        body += "</tr>"
    return f"<table><tr>{head}</tr>{body}</table>"


def _figure(caption: str, draw: Callable[..., Any], results: Outcomes) -> str:
    """Draw a picture as SVG within the page."""
    from matplotlib.figure import Figure

    # Without pyplot, which keeps figures and may want a screen.
    figure = Figure(figsize=(4.5, 3.6), layout="constrained")
    draw(results, ax=figure.add_subplot())
    file = io.StringIO()
    # Without the date, so that the same results make the same page.
    figure.savefig(file, format="svg", metadata={"Date": None})
    # An XML declaration comes first, which has no place within HTML.
    _, tag, rest = file.getvalue().partition("<svg")
    return f"<figure>{tag}{rest}<figcaption>{escape(caption)}</figcaption></figure>"


def _texts_table(
    results: Outcomes, texts: list[str], class_names: Sequence[str]
) -> str:
    """Write the texts of the most doubtful answers, with what is known of each."""
    prediction = results.prediction
    rows = []
    most_doubtful = prediction.review(capacity=_SHOWN).order[:_SHOWN]
    for place in most_doubtful.tolist():
        answer = int(prediction.labels[place])
        label = int(results.labels[place])
        named = escape(class_names[answer])
        if answer != label:
            named = f'<span class="wrong">{named}</span>'
        rows.append(
            [
                escape(shorten(texts[place], _LENGTH, placeholder=" …")),
                named,
                escape(class_names[label]),
                f"{results.trained[place].max():.2f}",
                escape(reason(prediction, place, class_names)),
            ]
        )
    return _table(["text", "answer", "label", "trained model", "posterior"], rows)
