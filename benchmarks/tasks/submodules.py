"""The task submodules: which of twelve parts of SymPy a docstring's summary documents."""

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


def find(options: TextRun, seed: int) -> list[list[str]]:
    """The summaries in each part."""
    root = package_folder(LIBRARY)
    found = {part: [] for part in PARTS}
    for one in documented(LIBRARY, options, seed):
        found.get(one.file.relative_to(root).parts[0], []).append(one.summary)
    return [*found.values()]


TASK = balanced("submodules", PARTS, Sizes(360, 0, 480, 0), find)
