"""The task submodules: which of twelve parts of one library a docstring's summary documents."""

from benchmarks.models import encoder_folder, package_folder
from benchmarks.options import TextRun
from benchmarks.tasks.balanced import draw_balanced
from benchmarks.tasks.docstrings import ENCODER, documented
from benchmarks.tasks.task import Sizes, Task, TaskSource

LIBRARY = "sympy"
PARTS = (
    *("codegen", "combinatorics", "core", "functions", "geometry", "integrals"),
    *("matrices", "ntheory", "physics", "polys", "printing", "stats"),
)


def read(options: TextRun, seed: int, validation: int) -> Task:
    """Draw the texts that the options ask for."""
    sizes = Sizes(360, validation, 480, 0).asked(options)
    root = package_folder(LIBRARY)
    found = {part: [] for part in PARTS}
    for one in documented(LIBRARY, seed, options.files_per_library, not options.quiet):
        found.get(one.file.relative_to(root).parts[0], []).append(one.summary)
    return Task("submodules", PARTS, False, **draw_balanced([*found.values()], PARTS, sizes, seed))


TASK = TaskSource("submodules", read, lambda options: encoder_folder(), ENCODER)
