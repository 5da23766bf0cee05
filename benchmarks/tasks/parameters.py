"""The tasks types and belongs: a parameter's type, and whether it belongs to a function.

Both read the sections "Parameters" of NumPy-style docstrings.
"""

import ast
import random
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from benchmarks.options import TextRun
from benchmarks.tasks.balanced import PAIRS, balanced
from benchmarks.tasks.docstrings import masked
from benchmarks.tasks.sources import Reading, syntax_trees
from benchmarks.tasks.task import Sizes

NUMPYDOC_LIBRARIES = ("numpy", "scipy", "networkx", "matplotlib", "pandas")
SECTION = re.compile(r"^Parameters\n-{4,}\n(.*?)(?=\n\n\S[^\n]*\n-{3,}|\Z)", re.M | re.S)
PARAMETER = re.compile(r"^(\w+) ?: ?([^\n]+)\n((?:(?:[ ]{2,}[^\n]*)?\n)*)", re.M)
# The class of a type, by the first word of the type as it is written.
TYPES = {
    **dict.fromkeys(("array_like", "array-like", "ndarray", "array", "(N", "(M"), "array"),
    **dict.fromkeys(("bool", "boolean"), "truth value"),
    **dict.fromkeys(("int", "integer"), "whole number"),
    **dict.fromkeys(("float", "scalar"), "real number"),
    **dict.fromkeys(("str", "string"), "text"),
    **dict.fromkeys(("callable", "function"), "function"),
    **dict.fromkeys(("dict", "dictionary"), "dictionary"),
    **dict.fromkeys(("list", "tuple", "sequence"), "sequence"),
}
CLASSES = tuple(dict.fromkeys(TYPES.values()))
VERDICTS = ("another function", "this function")
MINIMUM_WORDS = 5


class Parameter(NamedTuple):
    """How a docstring describes a parameter, and the summary of its function."""

    name: str
    type: str
    description: str
    summary: str
    file: int  # number of the source file


def read_parameters(options: Reading, seed: int) -> list[Parameter]:
    """Collect all parameters that are described, in the order of the sources."""
    found = []
    numbers = count()
    for library in NUMPYDOC_LIBRARIES:
        for tree in syntax_trees(library, options, seed):
            found += described(tree, next(numbers))
    return found


def described(tree: ast.AST, number: int) -> Iterator[Parameter]:
    """Yield the parameters that a source's public docstrings describe."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        docstring = ast.get_docstring(node) or ""
        summary = masked(docstring.split("\n\n", maxsplit=1)[0])
        if not (section := SECTION.search(textwrap.dedent(docstring))):
            continue
        for name, kind, text in PARAMETER.findall(section[1] + "\n"):
            description = masked(text.split("\n\n", maxsplit=1)[0])
            if len(description.split()) >= MINIMUM_WORDS <= len(summary.split()):
                first = re.split(r"[,;\s]", kind)[0].strip("`")
                yield Parameter(name, first, description, summary, number)


def find_types(options: TextRun, seed: int) -> Iterator[tuple[str, str]]:
    """Yield class of types and description."""
    for parameter in read_parameters(options, seed):
        if (kind := TYPES.get(parameter.type)) is not None:
            yield kind, parameter.description


def find_pairs(options: TextRun, seed: int) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield verdict and pair, each description once."""
    yield from pairs(read_parameters(options, seed), random.Random(seed))


def pairs(
    parameters: list[Parameter], generator: random.Random
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Pair summaries and descriptions; in wrong pairs, by turns, both come from one file."""
    first: dict[str, Parameter] = {}
    summaries: dict[int, set[str]] = defaultdict(set)
    owners: dict[str, set[str]] = defaultdict(set)
    for parameter in parameters:
        description = parameter.description.casefold()
        first.setdefault(description, parameter)
        summaries[parameter.file].add(parameter.summary)
        owners[description].add(parameter.summary)
    for place, (description, parameter) in enumerate(first.items()):
        others = sorted(summaries[parameter.file] - owners[description])
        if others:
            summary = parameter.summary if place % 2 else generator.choice(others)
            yield VERDICTS[place % 2], (summary, parameter.description)


TASKS = (
    balanced("types", CLASSES, Sizes(480, 0, 480, 0), find_types),
    balanced("belongs", VERDICTS, Sizes(800, 0, 500, 0), find_pairs, settings=PAIRS),
)
