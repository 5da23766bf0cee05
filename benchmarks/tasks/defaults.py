"""The task defaults: whether a flag is on by default, judged by its description."""

import ast
import re
import textwrap
from collections.abc import Iterator

from benchmarks.options import TextRun
from benchmarks.tasks.balanced import balanced
from benchmarks.tasks.docstrings import masked
from benchmarks.tasks.parameters import MINIMUM_WORDS, NUMPYDOC_LIBRARIES, PARAMETER, SECTION
from benchmarks.tasks.sources import syntax_trees
from benchmarks.tasks.task import Sizes

CLASSES = ("False", "True")
# Sentences and parentheses about defaults would give the answer away.
TOLD = re.compile(r"\([^()]*default[^()]*\)|[^.]*\bdefault[^.]*(?:\.|$)", re.IGNORECASE)


def find(options: TextRun, seed: int) -> Iterator[tuple[str, str]]:
    """Yield default and description."""
    for library in (*NUMPYDOC_LIBRARIES, "sympy", "torch"):
        for tree in syntax_trees(library, options, seed):
            for value, text in flags(tree):
                yield str(value), text


def flags(tree: ast.AST) -> Iterator[tuple[bool, str]]:
    """Yield default and description of parameters that are on or off by default."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        section = SECTION.search(textwrap.dedent(ast.get_docstring(node) or ""))
        described = PARAMETER.findall(section[1] + "\n") if section else ()
        texts = {name: text for name, _, text in described}
        for name, value in default_values(node.args):
            text = masked(TOLD.sub(" ", texts.get(name, "")))
            if isinstance(value, bool) and len(text.split()) >= MINIMUM_WORDS:
                yield value, text


def default_values(arguments: ast.arguments) -> Iterator[tuple[str, object]]:
    """Yield name and default of each parameter whose default is a constant."""
    positional = [*arguments.posonlyargs, *arguments.args][-len(arguments.defaults) or None :]
    parameters = [*positional, *arguments.kwonlyargs]
    defaults = [*arguments.defaults, *arguments.kw_defaults]
    for parameter, default in zip(parameters, defaults, strict=False):
        if isinstance(default, ast.Constant):
            yield parameter.arg, default.value


TASK = balanced("defaults", CLASSES, Sizes(150, 0, 300, 0), find)
