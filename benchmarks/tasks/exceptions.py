"""The task exceptions: which exception a message is raised with."""

import ast
from collections.abc import Iterator

from benchmarks.options import TextRun
from benchmarks.tasks.balanced import balanced
from benchmarks.tasks.docstrings import LIBRARIES, SHIFTED_LIBRARY, masked
from benchmarks.tasks.sources import syntax_trees
from benchmarks.tasks.task import Sizes

EXCEPTIONS = ("ValueError", "TypeError", "RuntimeError", "NotImplementedError")
MINIMUM_WORDS = 4
BLANK = "..."  # in place of a value in an f-string


def find(options: TextRun, seed: int) -> Iterator[tuple[str, str]]:
    """Yield exception and message."""
    for library in (*LIBRARIES, SHIFTED_LIBRARY):
        for tree in syntax_trees(library, options, seed):
            yield from raised(tree)


def raised(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the name and message of each exception raised with a literal message."""
    for node in ast.walk(tree):
        match node:
            case ast.Raise(exc=ast.Call(func=ast.Name(id=name), args=[message, *_])):
                text = masked(literal(message))
                if len(text.split()) >= MINIMUM_WORDS and name not in text:
                    yield name, text


def literal(node: ast.AST) -> str:
    """The text of a string, with blanks for inserted values; empty for other expressions."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(literal(value) or BLANK for value in values)
    return ""


TASK = balanced("exceptions", EXCEPTIONS, Sizes(100, 0, 500, 0), find)
