"""The task sections: which section of a NumPy-style docstring a paragraph comes from."""

import ast
import re
from collections.abc import Iterator

from benchmarks.options import TextRun
from benchmarks.tasks.balanced import balanced
from benchmarks.tasks.docstrings import masked
from benchmarks.tasks.parameters import NUMPYDOC_LIBRARIES
from benchmarks.tasks.sources import syntax_trees
from benchmarks.tasks.task import Sizes

SECTIONS = ("Parameters", "Returns", "Raises", "Notes", "Examples", "References")
HEADING = re.compile(r"^([A-Z][A-Za-z ]+)\n-{4,}\n", re.M)
WORDS = range(6, 60)


def find(options: TextRun, seed: int) -> Iterator[tuple[str, str]]:
    """Yield section and paragraph."""
    for library in NUMPYDOC_LIBRARIES:
        for tree in syntax_trees(library, options, seed):
            yield from paragraphs(tree)


def paragraphs(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield section and text of each paragraph of prose in a source's docstrings."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        _, *parts = HEADING.split(ast.get_docstring(node) or "")
        for section, body in zip(parts[::2], parts[1::2], strict=True):
            for paragraph in body.split("\n\n"):
                # An entry's first line, its name and type, would give the section away.
                lines = paragraph.splitlines()
                indented = [line for line in lines if line.startswith("    ")]
                text = masked(" ".join(indented or lines))
                if len(text.split()) in WORDS and ">>>" not in text:
                    yield section, text


TASK = balanced("sections", SECTIONS, Sizes(480, 0, 480, 0), find)
