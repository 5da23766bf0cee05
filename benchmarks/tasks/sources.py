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

Text = TypeVar("Text")
# No task is trained on its texts.
UNSEEN_LIBRARY = "sklearn"
TEST_FOLDERS = frozenset({"test", "tests", "testing", "_testing", "conftest"})


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
