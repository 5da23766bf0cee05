"""Draw the first page's picture: `python docs/idea.py` writes docs/idea.svg."""

from math import exp, pi, sqrt
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PICTURE = Path(__file__).with_suffix(".svg")
# The same picture is the same file; letters stay letters, in the reader's font.
STYLE = {"svg.hashsalt": "laplace-lora-ext", "svg.fonttype": "none", "font.size": 11}
COLOURS = ("#00695c", "#c62828", "#5c6bc0")
RIGHT = 8.5  # where probabilities stand


class Text(NamedTuple):
    """A text with two classes: how far apart their logits are, and how open that is."""

    name: str
    margin: float
    deviation: float


class View(NamedTuple):
    """How a panel sees the texts: at a temperature, or with some of the deviation."""

    title: str
    temperature: float = 1.0
    share: float = 0.0


TEXTS = (
    Text("settled by the training texts", 2.4, 0.5),
    Text("left open by them", 3.0, 2.8),
    Text("between two classes", 0.6, 0.6),
)
VIEWS = (
    View("trained model"),
    View("at a temperature", temperature=2.0),
    View("posterior, narrow prior", share=0.4),
    View("posterior, broad prior", share=1.0),
)


def draw(path: Path = PICTURE) -> None:
    """Write the picture as SVG."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        panels = figure.subplots(2, 2, sharex=True, sharey=True)
        for panel, view in zip(panels.flat, VIEWS, strict=True):
            draw_view(panel, view)
        figure.supxlabel("difference of the two logits", fontsize=11)
        figure.savefig(path, metadata={"Date": None})


def draw_view(panel: Axes, view: View) -> None:
    """Draw each text's margin, with its error bar and the probability of its class."""
    for place, text in enumerate(TEXTS):
        margin = text.margin / view.temperature
        deviation = text.deviation * view.share
        panel.errorbar(
            margin,
            -place,
            xerr=deviation or None,
            fmt="o",
            color=COLOURS[place],
            capsize=4,
            linewidth=2,
        )
        sure = f"{probability(margin, deviation):.0%}"
        panel.text(RIGHT, -place, sure, ha="right", va="center")
    panel.axvline(0, color="black", linewidth=1, linestyle=":")
    panel.set_title(view.title, fontsize=11)
    panel.set_yticks(
        [-place for place in range(len(TEXTS))], [text.name for text in TEXTS]
    )
    panel.set(xlim=(-1, RIGHT), ylim=(0.4 - len(TEXTS), 0.7), xticks=(0, 3, 6))
    panel.tick_params(left=False)
    panel.spines[["top", "left", "right"]].set_visible(False)


def probability(margin: float, deviation: float) -> float:
    """Return the probability of the class ahead, by the mean-field link."""
    return 1 / (1 + exp(-margin / sqrt(1 + pi / 8 * deviation**2)))


if __name__ == "__main__":
    draw()
