"""The task docstrings: which library a docstring's summary documents.

The texts are real: every run reads the first paragraphs of public docstrings from the sources of
installed packages, which are parsed and never imported. Nothing is downloaded or stored.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.tasks.balanced import balanced
from benchmarks.tasks.sources import Reading, drawn_files, syntax_tree
from benchmarks.tasks.task import Sizes

LIBRARIES = ("numpy", "scipy", "networkx", "sympy", "torch")
SHIFTED_LIBRARY = "matplotlib"
MINIMUM_WORDS = 5

# A summary that names its library would give the answer away. Full names are masked inside words
# too ("PyTorch", "SymPyDeprecationWarning"), short forms only where no letter touches them.
LIBRARY_NAME = re.compile(
    r"\w*(?:numpy|scipy|networkx|sympy|torch|matplotlib)\w*"
    r"|(?<![a-z])(?:np|sp|nx|mpl|plt|pyplot)(?![a-z])",
    re.IGNORECASE,
)
NEUTRAL_WORD = "library"


class Documented(NamedTuple):
    """A public function or class: its name, its docstring's summary, and the file it is in."""

    name: str
    summary: str
    file: Path


def docstring_summaries(source: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the docstring's first paragraph of each public function and class."""
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
    """Replace library names by a neutral word, and every run of white space by one space."""
    return " ".join(LIBRARY_NAME.sub(NEUTRAL_WORD, summary).split())


def documented(library: str, options: Reading, seed: int) -> Iterator[Documented]:
    """Yield all that an installed library documents, with masked summaries."""
    for path in drawn_files(library, options, seed):
        for name, summary in docstring_summaries(path.read_text(encoding="utf-8")):
            text = masked(summary)
            if len(text.split()) >= MINIMUM_WORDS:
                yield Documented(name, text, path)


def read_library(library: str, options: Reading, seed: int) -> list[Documented]:
    """Collect each summary of an installed library once, in the order of the sources."""
    found: dict[str, Documented] = {}
    for one in documented(library, options, seed):
        found.setdefault(one.summary.casefold(), one)
    return list(found.values())


def find(options: Reading, seed: int) -> Iterator[tuple[str, str]]:
    """Yield library and summary."""
    for library in (*LIBRARIES, SHIFTED_LIBRARY):
        for one in read_library(library, options, seed):
            yield library, one.summary


TASK = balanced("docstrings", LIBRARIES, Sizes(300, 0, 500, 200), find, SHIFTED_LIBRARY)
