"""Tasks of NumPy-style docstrings: types, belongs, defaults and sections.

They ask for a parameter's type, whether it belongs to a function, whether a flag is on
by default, and which section a paragraph comes from.
"""

import ast
import random
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.options import Reading
from benchmarks.tasks.balanced import PAIRS, Balanced, Labelled
from benchmarks.tasks.docstrings import (
    UNSEEN_LIBRARY,
    first_paragraph,
    in_each,
    masked,
    parsed_files,
)
from benchmarks.tasks.task import Sizes

LIBRARIES = ("numpy", "scipy", "networkx", "matplotlib", "pandas")
# The title of a section, which is underlined.
HEADING = re.compile(r"^([A-Z][A-Za-z ]+)\n-{4,}\n", re.MULTILINE)
# All of the section "Parameters", up to the next heading or the end.
PARAMETERS = re.compile(
    r"^Parameters\n-{4,}\n(.*?)(?=\n\n\S[^\n]*\n-{3,}|\Z)", re.MULTILINE | re.DOTALL
)
# A line "name : type", and the indented lines below it.
PARAMETER = re.compile(
    r"^(\w+) ?: ?([^\n]+)\n((?:(?:[ ]{2,}[^\n]*)?\n)*)", re.MULTILINE
)
MINIMUM_WORDS = 5

# First words of types as they are written, by their class.
WRITTEN_TYPES = {
    "array": ("array_like", "array-like", "ndarray", "array", "(N", "(M"),
    "truth value": ("bool", "boolean"),
    "whole number": ("int", "integer"),
    "real number": ("float", "scalar"),
    "text": ("str", "string"),
    "function": ("callable", "function"),
    "dictionary": ("dict", "dictionary"),
    "sequence": ("list", "tuple", "sequence"),
}
# The class of a type, by its first word.
TYPES = {word: name for name, words in WRITTEN_TYPES.items() for word in words}
VERDICTS = ("another function", "this function")
SECTIONS = ("Parameters", "Returns", "Raises", "Notes", "Examples", "References")
PARAGRAPH_WORDS = range(6, 60)
# Sentences and parentheses about defaults would give the answer away.
TOLD = re.compile(r"\([^()]*default[^()]*\)|[^.]*\bdefault[^.]*(?:\.|$)", re.IGNORECASE)


class Parameter(NamedTuple):
    """A parameter as a docstring describes it, and the summary of its function."""

    name: str
    type: str
    description: str
    summary: str
    file: Path


class Entry(NamedTuple):
    """A parameter in a docstring's list."""

    name: str
    type: str
    text: str


def entries(docstring: str) -> list[Entry]:
    """Read the section "Parameters"."""
    section = PARAMETERS.search(textwrap.dedent(docstring))
    if section is None:
        return []
    # The last entry may end with the text, and an entry's pattern with a line.
    text = section[1] + "\n"
    return [Entry(*groups) for groups in PARAMETER.findall(text)]


def read_parameters(
    libraries: Sequence[str], options: Reading, seed: int
) -> list[Parameter]:
    """Collect all parameters that are described, in the order of the sources."""
    parameters = []
    for path, tree in parsed_files(libraries, options, seed):
        parameters += described(tree, path)
    return parameters


def described(tree: ast.AST, file: Path) -> Iterator[Parameter]:
    """Yield the parameters that a source's public docstrings describe."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        if node.name.startswith("_"):
            continue
        docstring = ast.get_docstring(node) or ""
        summary = first_paragraph(docstring)
        if len(summary.split()) < MINIMUM_WORDS:
            continue
        for entry in entries(docstring):
            description = first_paragraph(entry.text)
            if len(description.split()) < MINIMUM_WORDS:
                continue
            yield Parameter(
                name=entry.name,
                type=first_word_of(entry.type),
                description=description,
                summary=summary,
                file=file,
            )


def first_word_of(written: str) -> str:
    """Return the first word of a type as a docstring has it, a key of `TYPES`."""
    words = re.split(r"[,;\s]", written)
    return words[0].strip("`")


def find_types(
    libraries: Sequence[str], options: Reading, seed: int
) -> Iterator[Labelled]:
    """Yield class of types and description."""
    for parameter in read_parameters(libraries, options, seed):
        if parameter.type in TYPES:
            yield TYPES[parameter.type], parameter.description


def find_pairs(
    libraries: Sequence[str], options: Reading, seed: int
) -> Iterator[Labelled]:
    """Yield verdict and pair, each description once."""
    return pairs(read_parameters(libraries, options, seed), random.Random(seed))


def pairs(parameters: list[Parameter], generator: random.Random) -> Iterator[Labelled]:
    """Pair summaries and descriptions, every second time wrongly.

    Both then come from one file.
    """
    first: dict[str, Parameter] = {}
    summaries: dict[Path, set[str]] = defaultdict(set)
    owners: dict[str, set[str]] = defaultdict(set)
    for parameter in parameters:
        description = parameter.description.casefold()
        first.setdefault(description, parameter)
        summaries[parameter.file].add(parameter.summary)
        # Functions share parameters: what belongs to another must not count as wrong.
        owners[description].add(parameter.summary)
    for place, (description, parameter) in enumerate(first.items()):
        # Sorted, so that the same seed draws the same summary in every process.
        others = sorted(summaries[parameter.file] - owners[description])
        if not others:
            continue
        is_right = place % 2
        summary = parameter.summary if is_right else generator.choice(others)
        yield VERDICTS[is_right], (summary, parameter.description)


def flags(tree: ast.AST) -> Iterator[Labelled]:
    """Yield default and description of parameters that are on or off by default."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        docstring = ast.get_docstring(node) or ""
        texts = {entry.name: entry.text for entry in entries(docstring)}
        for name, value in default_values(node.args):
            if not isinstance(value, bool):
                continue
            told = texts.get(name, "")
            text = masked(TOLD.sub(" ", told))
            if len(text.split()) >= MINIMUM_WORDS:
                yield str(value), text


def default_values(arguments: ast.arguments) -> Iterator[tuple[str, object]]:
    """Yield name and default of each parameter whose default is a constant."""
    positional = [*arguments.posonlyargs, *arguments.args]
    if arguments.defaults:
        # Parameters without a default come first, and Python lists no default for them.
        n_required = len(positional) - len(arguments.defaults)
        positional = positional[n_required:]
    # Where no positional parameter has a default, they stay, and are taken for the
    # keyword-only ones: one text in thirteen has the label of another. All published
    # figures are of these texts.
    parameters = [*positional, *arguments.kwonlyargs]
    defaults = [*arguments.defaults, *arguments.kw_defaults]
    for parameter, default in zip(parameters, defaults, strict=False):
        if isinstance(default, ast.Constant):
            yield parameter.arg, default.value


def paragraphs(tree: ast.AST) -> Iterator[Labelled]:
    """Yield section and text of each paragraph of prose in a source's docstrings."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        for section, body in sections(ast.get_docstring(node) or ""):
            for paragraph in body.split("\n\n"):
                lines = paragraph.splitlines()
                # An entry's first line, its name and type, would give the section away.
                indented = [line for line in lines if line.startswith("    ")]
                text = masked(" ".join(indented or lines))
                n_words = len(text.split())
                # Code would give the section of examples away.
                if n_words in PARAGRAPH_WORDS and ">>>" not in text:
                    yield section, text


def sections(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield title and text of each section that has a title."""
    _, *parts = HEADING.split(docstring)  # by turns titles and texts
    titles, texts = parts[::2], parts[1::2]
    yield from zip(titles, texts, strict=True)


TYPE_OF = Balanced(
    name="types",
    classes=tuple(WRITTEN_TYPES),
    sizes=Sizes(train=480, test=480, shifted=300),
    libraries=LIBRARIES,
    find=find_types,
    unseen=UNSEEN_LIBRARY,
)
BELONGS = Balanced(
    name="belongs",
    classes=VERDICTS,
    sizes=Sizes(train=800, test=500, shifted=300),
    libraries=LIBRARIES,
    find=find_pairs,
    unseen=UNSEEN_LIBRARY,
    hyperparameters=PAIRS,
)
DEFAULTS = Balanced(
    name="defaults",
    classes=("False", "True"),
    sizes=Sizes(train=150, test=300, shifted=300),
    # Flags are rare: two more libraries.
    libraries=(*LIBRARIES, "sympy", "torch"),
    find=in_each(flags),
    unseen=UNSEEN_LIBRARY,
)
SECTION_OF = Balanced(
    name="sections",
    classes=SECTIONS,
    sizes=Sizes(train=480, test=480, shifted=300),
    libraries=LIBRARIES,
    find=in_each(paragraphs),
    unseen=UNSEEN_LIBRARY,
)
