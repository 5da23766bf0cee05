"""The task comments: whether a comment stands above this line of code."""

import random
import re
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.models import encoder_folder
from benchmarks.options import TextRun
from benchmarks.tasks.balanced import draw_balanced
from benchmarks.tasks.docstrings import ENCODER, LIBRARIES
from benchmarks.tasks.sources import drawn_files
from benchmarks.tasks.task import Sizes, Task, TaskSource

VERDICTS = ("another line", "this line")
COMMENTED = re.compile(
    r"^(?P<indent>[ ]*)# (?P<comment>[A-Z].*)\n(?P=indent)(?P<line>[^#\s].*)", re.M
)
MINIMUM_WORDS = 4


def read(options: TextRun, seed: int, validation: int) -> Task:
    """Pair comments and lines, every second one with another line of the same file."""
    sizes = Sizes(600, validation, 500, 0).asked(options)
    generator = random.Random(seed)
    found: tuple[list, list] = [], []
    for library in LIBRARIES:
        for path in drawn_files(library, seed, options.files_per_library, not options.quiet):
            pairs = list(commented(path.read_text(encoding="utf-8")))
            for place, (comment, line) in enumerate(pairs):
                others = sorted({other for _, other in pairs} - {line})
                if others:
                    shown = line if place % 2 else generator.choice(others)
                    found[place % 2].append((comment, shown))
    return Task("comments", VERDICTS, False, **draw_balanced(found, VERDICTS, sizes, seed))


def commented(source: str) -> Iterator[tuple[str, str]]:
    """Yield each comment of a line of its own, and the line of code below it."""
    for match in COMMENTED.finditer(source):
        comment, line = match["comment"].strip(), match["line"].strip()
        if len(comment.split()) >= MINIMUM_WORDS and len(line) >= 10:
            yield comment, line


PAIRS = replace(ENCODER, maximum_length=48, steps=400)
TASK = TaskSource("comments", read, lambda options: encoder_folder(), PAIRS)
