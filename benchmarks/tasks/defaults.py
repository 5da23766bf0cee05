"""The task defaults: whether a flag is set by default, by what is said of it."""

import ast
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator

from benchmarks.models import encoder_folder
from benchmarks.options import TextRun
from benchmarks.tasks.balanced import draw_balanced
from benchmarks.tasks.docstrings import ENCODER, masked
from benchmarks.tasks.parameters import MINIMUM_WORDS, NUMPYDOC_LIBRARIES, PARAMETER, SECTION
from benchmarks.tasks.sources import syntax_trees
from benchmarks.tasks.task import Sizes, Task, TaskSource

CLASSES = ("False", "True")
# What would give the answer away: sentences and parentheses that speak of defaults.
TOLD = re.compile(r"\([^()]*default[^()]*\)|[^.]*\bdefault[^.]*(?:\.|$)", re.IGNORECASE)


def read(options: TextRun, seed: int, validation: int) -> Task:
    """Draw the descriptions that the options ask for."""
    sizes = Sizes(150, validation, 300, 0).asked(options)
    found = defaultdict(list)
    for library in (*NUMPYDOC_LIBRARIES, "sympy", "torch"):
        for tree in syntax_trees(library, seed, options.files_per_library, not options.quiet):
            for value, text in flags(tree):
                found[str(value)].append(text)
    texts = [found[value] for value in CLASSES]
    return Task("defaults", CLASSES, False, **draw_balanced(texts, CLASSES, sizes, seed))


def flags(tree: ast.AST) -> Iterator[tuple[bool, str]]:
    """Yield default and description of the parameters that are on or off by default."""
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


TASK = TaskSource("defaults", read, lambda options: encoder_folder(), ENCODER)
