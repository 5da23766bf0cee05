"""The task docstrings: which library a docstring's summary documents.

The texts are real: the sources of installed packages are parsed, never imported, and nothing is
downloaded or stored; every run reads the first paragraph of their public docstrings.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.models import encoder_folder
from benchmarks.options import TextRun
from benchmarks.tasks.balanced import draw_balanced
from benchmarks.tasks.sources import drawn_files, syntax_tree
from benchmarks.tasks.task import Sizes, Task, TaskSource
from benchmarks.training import Hyperparameters

LIBRARIES = ("numpy", "scipy", "networkx", "sympy", "torch")
SHIFTED_LIBRARY = "matplotlib"
MINIMUM_WORDS = 5

# A summary that names its library would give the answer away. Whole names count inside other words
# too ("PyTorch", "SymPyDeprecationWarning"), short forms only where no letter touches them.
LIBRARY_NAME = re.compile(
    r"\w*(?:numpy|scipy|networkx|sympy|torch|matplotlib)\w*"
    r"|(?<![a-z])(?:np|sp|nx|mpl|plt|pyplot)(?![a-z])",
    re.IGNORECASE,
)
NEUTRAL_WORD = "library"
LEARNING: Any = {"learning_rate": 2e-3, "steps": 375, "checkpoints": 5, "warmup_steps": 20}
ENCODER = Hyperparameters("all-MiniLM-L6-v2", ("query", "value"), 16, 32, **LEARNING)


class Documented(NamedTuple):
    """A public function or class: its name, its docstring's summary, and the file it is in."""

    name: str
    summary: str
    file: Path


def docstring_summaries(source: str) -> Iterator[tuple[str, str]]:
    """Yield name and first docstring paragraph of each public function and class of a source."""
    pending = [syntax_tree(source)]
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if not node.name.startswith("_"):
                pending += [node] if isinstance(node, ast.ClassDef) else []
                if docstring := ast.get_docstring(node):
                    yield node.name, docstring.split("\n\n", maxsplit=1)[0]


def masked(summary: str) -> str:
    """Replace library names by a neutral word and every run of white space by one space."""
    return " ".join(LIBRARY_NAME.sub(NEUTRAL_WORD, summary).split())


def documented(
    library: str, seed: int, maximum_files: int | None, show_progress: bool
) -> Iterator[Documented]:
    """Yield what an installed library documents, with masked summaries."""
    for path in drawn_files(library, seed, maximum_files, show_progress):
        for name, summary in docstring_summaries(path.read_text(encoding="utf-8")):
            text = masked(summary)
            if len(text.split()) >= MINIMUM_WORDS:
                yield Documented(name, text, path)


def read_library(
    library: str, seed: int, maximum_files: int | None, show_progress: bool
) -> list[Documented]:
    """Collect each summary of an installed library once, in the order of the sources."""
    found: dict[str, Documented] = {}
    for one in documented(library, seed, maximum_files, show_progress):
        found.setdefault(one.summary.casefold(), one)
    return list(found.values())


def read(options: TextRun, seed: int, validation: int) -> Task:
    """Draw the texts that the options ask for."""
    sizes = Sizes(300, validation, 500, 200).asked(options)
    return read_docstrings(sizes, seed, options.files_per_library, not options.quiet)


def read_docstrings(
    sizes: Sizes, seed: int, files_per_library: int | None, show_progress: bool
) -> Task:
    """Draw balanced, disjoint sets of texts; a label is the library's place in `LIBRARIES`."""
    libraries = (*LIBRARIES, SHIFTED_LIBRARY)
    found = [read_library(library, seed, files_per_library, show_progress) for library in libraries]
    texts = [[one.summary for one in of_library] for of_library in found]
    sets = draw_balanced(texts, LIBRARIES, sizes, seed, SHIFTED_LIBRARY)
    return Task("docstrings", LIBRARIES, False, **sets)


TASK = TaskSource("docstrings", read, lambda options: encoder_folder(), ENCODER)
