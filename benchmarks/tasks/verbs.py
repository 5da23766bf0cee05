"""The task verbs: which of ten verbs a summary begins with, when its first word is left out."""

from collections.abc import Iterator

from benchmarks.options import TextRun
from benchmarks.tasks.balanced import balanced
from benchmarks.tasks.docstrings import LIBRARIES, read_library
from benchmarks.tasks.task import Sizes

VERBS = (
    *("apply", "calculate", "check", "compute", "convert"),
    *("create", "evaluate", "get", "return", "set"),
)


def find(options: TextRun, seed: int) -> Iterator[tuple[str, str]]:
    """Yield verb and the rest of the summary."""
    for library in LIBRARIES:
        for one in read_library(library, options, seed):
            first, _, rest = one.summary.partition(" ")
            yield first.lower().removesuffix("s"), rest


TASK = balanced("verbs", VERBS, Sizes(200, 0, 500, 0), find)
