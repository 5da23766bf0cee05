"""The task sections: from which section of a docstring in NumPy's style a paragraph is."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.models import encoder_folder
from benchmarks.options import TextRun
from benchmarks.tasks.balanced import draw_balanced
from benchmarks.tasks.docstrings import ENCODER, masked
from benchmarks.tasks.parameters import NUMPYDOC_LIBRARIES
from benchmarks.tasks.sources import syntax_trees
from benchmarks.tasks.task import Sizes, Task, TaskSource

SECTIONS = ("Parameters", "Returns", "Raises", "Notes", "Examples", "References")
HEADING = re.compile(r"^([A-Z][A-Za-z ]+)\n-{4,}\n", re.M)
WORDS = range(6, 60)


def read(options: TextRun, seed: int, validation: int) -> Task:
    """Draw the paragraphs that the options ask for."""
    sizes = Sizes(1200, validation, 480, 0).asked(options)
    found = defaultdict(list)
    for library in NUMPYDOC_LIBRARIES:
        for tree in syntax_trees(library, seed, options.files_per_library, not options.quiet):
            for section, text in paragraphs(tree):
                found[section].append(text)
    texts = [found[section] for section in SECTIONS]
    return Task("sections", SECTIONS, False, **draw_balanced(texts, SECTIONS, sizes, seed))


def paragraphs(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield section and text of the paragraphs of prose in the docstrings of a source."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        _, *parts = HEADING.split(ast.get_docstring(node) or "")
        for section, body in zip(parts[::2], parts[1::2], strict=True):
            for paragraph in body.split("\n\n"):
                # The first line of an entry is its name and type, which would give it away.
                lines = paragraph.splitlines()
                indented = [line for line in lines if line.startswith("    ")]
                text = masked(" ".join(indented or lines))
                if len(text.split()) in WORDS and ">>>" not in text:
                    yield section, text


TASK = TaskSource("sections", read, lambda options: encoder_folder(), replace(ENCODER, steps=600))
