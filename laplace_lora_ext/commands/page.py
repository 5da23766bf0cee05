"""One page of HTML that needs no other file: a table, pictures, and texts to check."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from laplace_lora_ext import plots
from laplace_lora_ext.commands.verdict import HEADER, UNITS, figures_of, reason
from laplace_lora_ext.plots import Outcomes

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


def page(
    title: str,
    verdict: str,
    results: Outcomes,
    texts: list[str],
    class_names: Sequence[str],
    n_texts: int = 20,
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
        _texts_table(results, texts, class_names, n_texts),
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
    results: Outcomes, texts: list[str], class_names: Sequence[str], n_texts: int
) -> str:
    """Write the texts of the most doubtful answers, with what is known of each."""
    prediction = results.prediction
    rows = []
    for place in prediction.review(capacity=n_texts).order[:n_texts].tolist():
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
                f"{results.trained[place].max():.2f}",
                escape(reason(prediction, place, class_names)),
            ]
        )
    return _table(["text", "answer", "label", "trained model", "posterior"], rows)


def shortened(text: str, length: int = 240) -> str:
    """Cut a long text at a word."""
    if len(text) <= length:
        return text
    return text[:length].rpartition(" ")[0] + " …"
