"""The task comments: whether a comment belongs to a line of code."""

import random
import re
from collections.abc import Iterator

from benchmarks.options import TextRun
from benchmarks.tasks.balanced import PAIRS, balanced
from benchmarks.tasks.docstrings import LIBRARIES
from benchmarks.tasks.sources import drawn_files
from benchmarks.tasks.task import Sizes

VERDICTS = ("another line", "this line")
COMMENTED = re.compile(
    r"^(?P<indent>[ ]*)# (?P<comment>[A-Z].*)\n(?P=indent)(?P<line>[^#\s].*)", re.M
)
MINIMUM_WORDS = 4


def find(options: TextRun, seed: int) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield verdict and pair of comment and line, by turns with another line of the same file."""
    generator = random.Random(seed)
    for library in LIBRARIES:
        for path in drawn_files(library, options, seed):
            pairs = list(commented(path.read_text(encoding="utf-8")))
            for place, (comment, line) in enumerate(pairs):
                others = sorted({other for _, other in pairs} - {line})
                if others:
                    shown = line if place % 2 else generator.choice(others)
                    yield VERDICTS[place % 2], (comment, shown)


def commented(source: str) -> Iterator[tuple[str, str]]:
    """Yield each comment that has a line to itself, and the line of code below it."""
    for match in COMMENTED.finditer(source):
        comment, line = match["comment"].strip(), match["line"].strip()
        if len(comment.split()) >= MINIMUM_WORDS and len(line) >= 10:
            yield comment, line


TASK = balanced("comments", VERDICTS, Sizes(600, 0, 500, 0), find, settings=PAIRS)
