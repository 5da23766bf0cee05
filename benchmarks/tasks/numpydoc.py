"""Tasks of NumPy-style docstrings: types, belongs, defaults and sections.

They ask for a parameter's type, whether it belongs to a function, whether a flag is on by default,
and which section a paragraph comes from.
"""

import ast
import random
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.options import Reading
from benchmarks.tasks.balanced import PAIRS, Balanced
from benchmarks.tasks.docstrings import masked
from benchmarks.tasks.sources import in_each, parsed_files
from benchmarks.tasks.task import Sizes

LIBRARIES = ("numpy", "scipy", "networkx", "matplotlib", "pandas")
HEADING = re.compile(r"^([A-Z][A-Za-z ]+)\n-{4,}\n", re.M)
PARAMETERS = re.compile(r"^Parameters\n-{4,}\n(.*?)(?=\n\n\S[^\n]*\n-{3,}|\Z)", re.M | re.S)
PARAMETER = re.compile(r"^(\w+) ?: ?([^\n]+)\n((?:(?:[ ]{2,}[^\n]*)?\n)*)", re.M)
MINIMUM_WORDS = 5

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
SECTIONS = ("Parameters", "Returns", "Raises", "Notes", "Examples", "References")
PARAGRAPH_WORDS = range(6, 60)
# Sentences and parentheses about defaults would give the answer away.
TOLD = re.compile(r"\([^()]*default[^()]*\)|[^.]*\bdefault[^.]*(?:\.|$)", re.IGNORECASE)


class Parameter(NamedTuple):
    """How a docstring describes a parameter, and the summary of its function."""

    name: str
    type: str
    description: str
    summary: str
    file: Path


def entries(docstring: str) -> list[tuple[str, str, str]]:
    """Name, type and text of each entry of the section "Parameters"."""
    section = PARAMETERS.search(textwrap.dedent(docstring))
    return PARAMETER.findall(section[1] + "\n") if section else []


def read_parameters(options: Reading, seed: int) -> list[Parameter]:
    """Collect all parameters that are described, in the order of the sources."""
    files = parsed_files(LIBRARIES, options, seed)
    return [parameter for path, tree in files for parameter in described(tree, path)]


def described(tree: ast.AST, file: Path) -> Iterator[Parameter]:
    """Yield the parameters that a source's public docstrings describe."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        docstring = ast.get_docstring(node) or ""
        summary = masked(docstring.split("\n\n", maxsplit=1)[0])
        for name, kind, text in entries(docstring):
            description = masked(text.split("\n\n", maxsplit=1)[0])
            if len(description.split()) >= MINIMUM_WORDS <= len(summary.split()):
                first = re.split(r"[,;\s]", kind)[0].strip("`")
                yield Parameter(name, first, description, summary, file)


def find_types(options: Reading, seed: int) -> Iterator[tuple[str, str]]:
    """Yield class of types and description."""
    for parameter in read_parameters(options, seed):
        if (kind := TYPES.get(parameter.type)) is not None:
            yield kind, parameter.description


def find_pairs(options: Reading, seed: int) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield verdict and pair, each description once."""
    return pairs(read_parameters(options, seed), random.Random(seed))


def pairs(
    parameters: list[Parameter], generator: random.Random
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Pair summaries and descriptions; in wrong pairs, by turns, both come from one file."""
    first: dict[str, Parameter] = {}
    summaries: dict[Path, set[str]] = defaultdict(set)
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


def flags(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield default and description of parameters that are on or off by default."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        texts = {name: text for name, _, text in entries(ast.get_docstring(node) or "")}
        for name, value in default_values(node.args):
            text = masked(TOLD.sub(" ", texts.get(name, "")))
            if isinstance(value, bool) and len(text.split()) >= MINIMUM_WORDS:
                yield str(value), text


def default_values(arguments: ast.arguments) -> Iterator[tuple[str, object]]:
    """Yield name and default of each parameter whose default is a constant."""
    positional = [*arguments.posonlyargs, *arguments.args][-len(arguments.defaults) or None :]
    parameters = [*positional, *arguments.kwonlyargs]
    defaults = [*arguments.defaults, *arguments.kw_defaults]
    for parameter, default in zip(parameters, defaults, strict=False):
        if isinstance(default, ast.Constant):
            yield parameter.arg, default.value


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
                if len(text.split()) in PARAGRAPH_WORDS and ">>>" not in text:
                    yield section, text


TYPE_OF = Balanced("types", CLASSES, Sizes(480, 480), find_types)
BELONGS = Balanced("belongs", VERDICTS, Sizes(800, 500), find_pairs, PAIRS)
FLAGS = in_each((*LIBRARIES, "sympy", "torch"), flags)
DEFAULTS = Balanced("defaults", ("False", "True"), Sizes(150, 300), FLAGS)
PARAGRAPHS = in_each(LIBRARIES, paragraphs)
SECTION_OF = Balanced("sections", SECTIONS, Sizes(480, 480), PARAGRAPHS)
