"""The task verbs: with which of ten verbs a summary began, when its first word is left out."""

from collections import defaultdict

from benchmarks.models import encoder_folder
from benchmarks.options import TextRun
from benchmarks.tasks.balanced import draw_balanced
from benchmarks.tasks.docstrings import ENCODER, LIBRARIES, read_library
from benchmarks.tasks.task import Sizes, Task, TaskSource

VERBS = (
    *("apply", "calculate", "check", "compute", "convert"),
    *("create", "evaluate", "get", "return", "set"),
)


def read(options: TextRun, seed: int, validation: int) -> Task:
    """Draw the summaries that the options ask for."""
    sizes = Sizes(200, validation, 500, 0).asked(options)
    found = defaultdict(list)
    for library in LIBRARIES:
        for one in read_library(library, seed, options.files_per_library, not options.quiet):
            first, _, rest = one.summary.partition(" ")
            found[first.lower().removesuffix("s")].append(rest)
    texts = [found[verb] for verb in VERBS]
    return Task("verbs", VERBS, False, **draw_balanced(texts, VERBS, sizes, seed))


TASK = TaskSource("verbs", read, lambda options: encoder_folder(), ENCODER)
