"""The task submodules: which of twelve parts of SymPy a docstring's summary documents."""

from collections.abc import Iterator

from benchmarks.models import package_folder
from benchmarks.options import TextRun
from benchmarks.tasks.balanced import balanced
from benchmarks.tasks.docstrings import documented
from benchmarks.tasks.task import Sizes

LIBRARY = "sympy"
PARTS = (
    *("codegen", "combinatorics", "core", "functions", "geometry", "integrals"),
    *("matrices", "ntheory", "physics", "polys", "printing", "stats"),
)


def find(options: TextRun, seed: int) -> Iterator[tuple[str, str]]:
    """Yield part and summary."""
    root = package_folder(LIBRARY)
    for one in documented(LIBRARY, options, seed):
        yield one.file.relative_to(root).parts[0], one.summary


TASK = balanced("submodules", PARTS, Sizes(360, 0, 480, 0), find)
