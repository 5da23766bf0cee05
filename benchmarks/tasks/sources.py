"""Real text, read from installed sources: docstrings' summaries, and what they document.

The sources are parsed, never imported, and nothing is downloaded or stored: every run reads the
first paragraph of the public docstrings of the installed packages.
"""

import ast
import importlib.util
import random
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

LIBRARIES = ("numpy", "scipy", "networkx", "sympy", "torch")
SHIFTED_LIBRARY = "matplotlib"
MINIMUM_WORDS = 5

# A summary that names its library would give the answer away. Whole names count inside other words
# too ("PyTorch", "SymPyDeprecationWarning"), short forms only where no letter touches them.
LIBRARY_NAME = re.compile(
    r"\w*(?:numpy|scipy|networkx|sympy|torch|matplotlib)\w*"
    r"|(?<![a-z])(?:np|sp|nx|mpl|plt|pyplot)(?![a-z])",
    re.IGNORECASE,
)
NEUTRAL_WORD = "library"
TEST_FOLDERS = frozenset({"test", "tests", "testing", "_testing", "conftest"})


class Documented(NamedTuple):
    """A public function or class: its name, its docstring's summary, and the file it is in."""

    name: str
    summary: str
    file: Path


def source_files(library: str) -> list[Path]:
    """Find the Python files of an installed package, without its tests, in a fixed order."""
    specification = importlib.util.find_spec(library)
    if specification is None or not specification.submodule_search_locations:
        raise ModuleNotFoundError(
            f"The benchmark reads docstrings of {library}, which is not installed."
        )
    root = Path(specification.submodule_search_locations[0])
    files = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        name = inside.stem
        in_tests = any(part in TEST_FOLDERS for part in inside.parts[:-1])
        if not (in_tests or name in TEST_FOLDERS or name.startswith("test_")):
            files.append(path)
    return files


def docstring_summaries(source: str) -> Iterator[tuple[str, str]]:
    """Yield name and first docstring paragraph of each public function and class of a source."""
    with warnings.catch_warnings():
        # Invalid escapes in somebody else's sources are not this benchmark's business.
        warnings.simplefilter("ignore", SyntaxWarning)
        pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        parent = pending.pop()
        for node in ast.iter_child_nodes(parent):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if node.name.startswith("_"):
                continue
            if isinstance(node, ast.ClassDef):
                pending.append(node)
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.name, docstring.split("\n\n", maxsplit=1)[0]


def masked(summary: str) -> str:
    """Replace library names by a neutral word and every run of white space by one space."""
    return " ".join(LIBRARY_NAME.sub(NEUTRAL_WORD, summary).split())


def read_library(
    library: str, seed: int, maximum_files: int | None, show_progress: bool
) -> list[Documented]:
    """Collect the masked summaries of one installed library, in the order of the sources.

    Of more source files than `maximum_files`, some are drawn. A summary that is there twice
    (whatever its case) is listed once.
    """
    found: dict[str, Documented] = {}
    files = source_files(library)
    if maximum_files is not None and len(files) > maximum_files:
        files = random.Random(seed).sample(files, maximum_files)
    for path in tqdm(files, desc=f"Reading {library}", disable=not show_progress, unit="file"):
        for name, summary in docstring_summaries(path.read_text(encoding="utf-8")):
            text = masked(summary)
            if len(text.split()) >= MINIMUM_WORDS:
                found.setdefault(text.casefold(), Documented(name, text, path))
    return list(found.values())
