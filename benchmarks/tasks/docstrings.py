"""Tasks of docstrings: their library, part of SymPy, or first verb.

The texts are real: every run reads them from the sources of installed packages, which
are parsed and never imported. Nothing is downloaded or stored.
"""

import ast
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from tqdm import tqdm

from benchmarks.models import package_folder
from benchmarks.options import Reading
from benchmarks.tasks.balanced import Balanced, Labelled
from benchmarks.tasks.task import Sizes

LIBRARIES = ("numpy", "scipy", "networkx", "sympy", "torch")
SHIFTED_LIBRARY = "matplotlib"
# No task is trained on its texts.
UNSEEN_LIBRARY = "sklearn"
TEST_FOLDERS = frozenset({"test", "tests", "testing", "_testing", "conftest"})
PARTS = (
    "codegen",
    "combinatorics",
    "core",
    "functions",
    "geometry",
    "integrals",
    "matrices",
    "ntheory",
    "physics",
    "polys",
    "printing",
    "stats",
)
VERBS = (
    "apply",
    "calculate",
    "check",
    "compute",
    "convert",
    "create",
    "evaluate",
    "get",
    "return",
    "set",
)
MINIMUM_WORDS = 5

# A summary that names its library would give the answer away. Full names are masked
# inside words too ("PyTorch", "SymPyDeprecationWarning"), short forms only where no
# letter touches them.
LIBRARY_NAME = re.compile(
    r"\w*(?:numpy|scipy|networkx|sympy|torch|matplotlib)\w*"
    r"|(?<![a-z])(?:np|sp|nx|mpl|plt|pyplot)(?![a-z])",
    re.IGNORECASE,
)
NEUTRAL_WORD = "library"

Text = TypeVar("Text")


def source_files(library: str) -> list[Path]:
    """Find an installed package's Python files, without its tests, in a fixed order."""
    root = package_folder(library)
    files = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if path.stem.startswith("test_") or TEST_FOLDERS.intersection(parts):
            continue
        files.append(path)
    return files


def drawn_files(
    libraries: Sequence[str], options: Reading, seed: int
) -> Iterator[Path]:
    """Yield installed packages' source files, as many as options ask for."""
    maximum = options.files_per_library
    for library in libraries:
        files = source_files(library)
        if maximum is not None and len(files) > maximum:
            files = random.Random(seed).sample(files, maximum)
        yield from tqdm(
            files, desc=f"Reading {library}", disable=options.quiet, unit="file"
        )


def parsed_files(
    libraries: Sequence[str], options: Reading, seed: int
) -> Iterator[tuple[Path, ast.AST]]:
    """Yield the sources of installed packages with their paths, parsed."""
    for path in drawn_files(libraries, options, seed):
        with warnings.catch_warnings():
            # Other packages' invalid escapes tell a reader of results nothing.
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(path.read_text(encoding="utf-8"))
        yield path, tree


def in_each(
    find: Callable[[ast.AST], Iterator[Text]],
) -> Callable[[Sequence[str], Reading, int], Iterator[Text]]:
    """Make a function that yields all that `find` finds in the sources of libraries."""

    def find_in_sources(
        libraries: Sequence[str], options: Reading, seed: int
    ) -> Iterator[Text]:
        for _, tree in parsed_files(libraries, options, seed):
            yield from find(tree)

    return find_in_sources


class Documented(NamedTuple):
    """A public function or class: name, file, and summary of its docstring."""

    name: str
    summary: str
    file: Path


def masked(summary: str) -> str:
    """Replace library names by a neutral word, and white space by single spaces."""
    words = LIBRARY_NAME.sub(NEUTRAL_WORD, summary).split()
    return " ".join(words)


def first_paragraph(text: str) -> str:
    """Return what stands before the first empty line, masked."""
    paragraph, _, _ = text.partition("\n\n")
    return masked(paragraph)


def docstring_summaries(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield name and summary of each public function and class."""
    pending = [tree]
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            if not isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            ):
                continue
            if node.name.startswith("_"):
                continue
            # Methods of a class are public too; functions inside of a function are not.
            if isinstance(node, ast.ClassDef):
                pending.append(node)
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.name, first_paragraph(docstring)


def documented(library: str, options: Reading, seed: int) -> Iterator[Documented]:
    """Yield all that an installed library documents, with masked summaries."""
    for path, tree in parsed_files([library], options, seed):
        for name, summary in docstring_summaries(tree):
            if len(summary.split()) >= MINIMUM_WORDS:
                yield Documented(name, summary, path)


def read_library(library: str, options: Reading, seed: int) -> list[Documented]:
    """Collect each summary of an installed library once, in order."""
    by_summary: dict[str, Documented] = {}
    for one in documented(library, options, seed):
        by_summary.setdefault(one.summary.casefold(), one)
    return list(by_summary.values())


def find(libraries: Sequence[str], options: Reading, seed: int) -> Iterator[Labelled]:
    """Yield library and summary."""
    for library in libraries:
        for one in read_library(library, options, seed):
            yield library, one.summary


def find_parts(
    libraries: Sequence[str], options: Reading, seed: int
) -> Iterator[Labelled]:
    """Yield part of a library and summary."""
    for library in libraries:
        root = package_folder(library)
        for one in documented(library, options, seed):
            part = one.file.relative_to(root).parts[0]
            yield part, one.summary


def find_verbs(
    libraries: Sequence[str], options: Reading, seed: int
) -> Iterator[Labelled]:
    """Yield the verb that a summary begins with and the rest of it."""
    for library in libraries:
        for one in read_library(library, options, seed):
            first, _, rest = one.summary.partition(" ")
            # "Returns" is "return".
            verb = first.lower().removesuffix("s")
            yield verb, rest


DOCSTRINGS = Balanced(
    name="docstrings",
    classes=LIBRARIES,
    sizes=Sizes(train=300, test=500, shifted=200),
    libraries=(*LIBRARIES, SHIFTED_LIBRARY),
    find=find,
    shifted=SHIFTED_LIBRARY,
)
SUBMODULES = Balanced(
    name="submodules",
    classes=PARTS,
    sizes=Sizes(train=360, test=480),
    libraries=("sympy",),
    find=find_parts,
)
VERBS_LEFT_OUT = Balanced(
    name="verbs",
    classes=VERBS,
    sizes=Sizes(train=200, test=500, shifted=300),
    libraries=LIBRARIES,
    find=find_verbs,
    unseen=UNSEEN_LIBRARY,
)
