"""A task of several labels: what the code of a function does, by its docstring."""

import ast
from collections.abc import Iterator

from benchmarks.tasks.docstrings import LIBRARIES, MINIMUM_WORDS, first_paragraph
from benchmarks.tasks.drawn import Drawn
from benchmarks.tasks.names import spoken
from benchmarks.tasks.sources import UNSEEN_LIBRARY, in_each
from benchmarks.tasks.task import Example, Sizes

# What stands somewhere in the code, by the label that it is.
SIGNS = {
    "branches": (ast.If, ast.IfExp),
    "loops": (ast.For, ast.While, ast.comprehension),
    "raises": (ast.Raise,),
    "calculates": (ast.BinOp,),
    "indexes": (ast.Subscript,),
}


def functions(tree: ast.AST) -> Iterator[Example]:
    """Yield names and summaries of functions, with what their code does."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        summary = first_paragraph(ast.get_docstring(node) or "")
        # Behind the docstring; where there is no code, what it does can't be asked.
        _, *code = node.body
        if len(summary.split()) < MINIMUM_WORDS or not code:
            continue
        parts = [part for statement in code for part in ast.walk(statement)]
        labels = []
        for signs in SIGNS.values():
            is_there = any(isinstance(part, signs) for part in parts)
            labels.append(int(is_there))
        text = f"{spoken(node.name)} : {summary}"
        yield Example(text, None, labels=tuple(labels))


FUNCTIONS = Drawn(
    name="functions",
    classes=tuple(SIGNS),
    sizes=Sizes(train=300, test=400, shifted=300),
    libraries=LIBRARIES,
    unseen=UNSEEN_LIBRARY,
    find=in_each(functions),
)
