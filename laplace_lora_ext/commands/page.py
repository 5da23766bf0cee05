"""One page of HTML that needs no other file: a table, pictures, and texts to check."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from torch import Tensor

from laplace_lora_ext import plots
from laplace_lora_ext.metrics import quality
from laplace_lora_ext.plots import Outcomes

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 70rem;
       padding: 1rem;
       color: #222; background: #fff; }
h1, h2 { line-height: 1.2; }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem; margin-top: 1.5rem; }
.pictures figure { flex: 1 1 18rem; margin: 0; min-width: 0; }
.pictures svg { width: 100%; height: auto; }
.scrolls { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #ddd;
         vertical-align: top; }
th:first-child, td:first-child { text-align: left; min-width: 9rem; }
.wrong { color: #b00; }
"""
_ORDER = (
    "Those whose answers have the highest entropy. Aleatoric entropy is doubt that all "
    "draws of the weights share; epistemic entropy is what more training texts would "
    "lessen."
)
# Captions, and what draws each picture.
_PICTURES: dict[str, Callable[..., Any]] = {
    "How often answers are right, by how sure they are": plots.reliability,
    "Errors among the surest answers": plots.risk_coverage,
    "Entropies of right and of wrong answers": plots.entropies,
}


def page(
    title: str,
    results: Outcomes,
    texts: list[str],
    class_names: Sequence[str],
    tables: Sequence[str] = (),
    n_texts: int = 20,
) -> str:
    """Write the page: a whole HTML document."""
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{len(texts):,} texts, {len(class_names)} classes.</p>",
        *(tables or [_quality_table(results)]),
        '<div class="pictures">',
        *(_figure(caption, draw, results) for caption, draw in _PICTURES.items()),
        "</div>",
        "<h2>Texts to look at first</h2>",
        f"<p>{_ORDER}</p>",
        _texts_table(results, texts, class_names, n_texts),
    ]
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def doubtful_first(results: Outcomes) -> Tensor:
    """Order texts by the entropy of their answers, the highest first."""
    return results.prediction.total_entropy.argsort(descending=True, stable=True)


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> str:
    """Write a table of cells that are HTML already."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = ""
    for row in rows:
        cells = "".join(f"<td>{cell}</td>" for cell in row)
        body += f"<tr>{cells}</tr>"
    return f'<div class="scrolls"><table><tr>{head}</tr>{body}</table></div>'


def _quality_table(results: Outcomes) -> str:
    """Write accuracy and calibration, before and after."""
    rows = []
    for name, probabilities in results.probabilities.items():
        figures = quality(probabilities, results.labels)
        rows.append([name, *(f"{value:.3f}" for value in figures.values())])
    return table(["", "accuracy", "NLL", "ECE", "Brier"], rows)


def _figure(
    caption: str,
    draw: Callable[..., Any],
    results: Outcomes,
) -> str:
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
    results: Outcomes,
    texts: list[str],
    class_names: Sequence[str],
    n_texts: int,
) -> str:
    """Write the texts of the most doubtful answers, with what is known of each."""
    prediction = results.prediction
    rows = []
    for place in doubtful_first(results)[:n_texts].tolist():
        answer = int(prediction.labels[place])
        label = int(results.labels[place])
        named = escape(class_names[answer])
        if answer != label:
            named = f'<span class="wrong">{named}</span>'
        rows.append(
            [
                escape(shortened(texts[place])),
                named,
                escape(class_names[label]),
                f"{results.trained[place].max().item():.2f}",
                f"{prediction.probabilities[place].max().item():.2f}",
                f"{prediction.aleatoric_entropy[place].item():.2f}",
                f"{prediction.epistemic_entropy[place].item():.2f}",
            ]
        )
    header = ["text", "answer", "label", "before", "after", "aleatoric", "epistemic"]
    return table(header, rows)


def shortened(text: str, length: int = 240) -> str:
    """Cut a long text at a word."""
    if len(text) <= length:
        return text
    return text[:length].rpartition(" ")[0] + " …"
