"""Source files of installed packages; they are parsed, never imported."""

import ast
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from benchmarks.models import package_folder
from benchmarks.options import Reading

Found = TypeVar("Found")
TEST_FOLDERS = frozenset({"test", "tests", "testing", "_testing", "conftest"})


def source_files(library: str) -> list[Path]:
    """Find an installed package's Python files, without its tests, in a fixed order."""
    root = package_folder(library)
    files = [path for path in sorted(root.rglob("*.py")) if not path.stem.startswith("test_")]
    parts = {path: path.relative_to(root).with_suffix("").parts for path in files}
    return [path for path in files if not TEST_FOLDERS.intersection(parts[path])]


def drawn_files(libraries: Sequence[str], options: Reading, seed: int) -> Iterator[Path]:
    """Yield installed packages' source files, or as many of each as the options ask for."""
    for library in libraries:
        files, maximum = source_files(library), options.files_per_library
        if maximum is not None and len(files) > maximum:
            files = random.Random(seed).sample(files, maximum)
        yield from tqdm(files, desc=f"Reading {library}", disable=options.quiet, unit="file")


def parsed_files(
    libraries: Sequence[str], options: Reading, seed: int
) -> Iterator[tuple[Path, ast.AST]]:
    """Yield the sources of installed packages, parsed without warnings of invalid escapes."""
    for path in drawn_files(libraries, options, seed):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(path.read_text(encoding="utf-8"))
        yield path, tree


def in_each(
    libraries: Sequence[str], find: Callable[[ast.AST], Iterator[Found]]
) -> Callable[[Reading, int], Iterator[Found]]:
    """A function of options and seed that yields what `find` finds in each source."""
    return lambda options, seed: (
        found for _, tree in parsed_files(libraries, options, seed) for found in find(tree)
    )
