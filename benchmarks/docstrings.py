"""Real text, read from installed sources: a docstring's summary and the library it documents.

The sources are parsed, never imported, and nothing is downloaded or stored: every run reads the
first paragraph of the public docstrings of the installed packages.
"""

import ast
import importlib.util
import random
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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

Example = tuple[str, int]


class Documented(NamedTuple):
    """A public function or class: its name, its docstring's summary, and the file it is in."""

    name: str
    summary: str
    file: Path


@dataclass(frozen=True)
class Splits:
    """Texts with their labels, and the texts of a library that has no label."""

    train: list[Example]
    validation: list[Example]
    test: list[Example]
    shifted: list[str]


def source_files(library: str) -> list[Path]:
    """Find the Python files of an installed package, without its tests.

    Parameters
    ----------
    library : str
        Name of the package, which is located but not imported.

    Returns
    -------
    files : list of Path
        The files in a fixed order.
    """
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
    """Yield name and first docstring paragraph of each public function and class in a source text.

    Parameters
    ----------
    source : str
        Text of a Python file.

    Yields
    ------
    name, summary : str
        A name, and a paragraph as it is written, white space included.
    """
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
    """Replace library names by a neutral word and every run of white space by one space.

    Parameters
    ----------
    summary : str
        A docstring's first paragraph.

    Returns
    -------
    text : str
        One line of text.
    """
    return " ".join(LIBRARY_NAME.sub(NEUTRAL_WORD, summary).split())


def read_library(
    library: str, seed: int, maximum_files: int | None = None, show_progress: bool = True
) -> list[Documented]:
    """Collect the masked summaries of one installed library.

    Parameters
    ----------
    library : str
        Name of the package.
    seed : int
        Seed of the draw of files.
    maximum_files : int, optional
        Number of source files above which some are left out, drawn at random.
    show_progress : bool, default=True
        Whether to show a progress bar over the library's files.

    Returns
    -------
    documented : list of Documented
        Those with summaries of at least `MINIMUM_WORDS` words in the order of the sources; a
        summary that is there twice (whatever its case) is listed once.
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


def without_shared(texts: Sequence[Sequence[str]]) -> list[list[str]]:
    """Drop every text that occurs in more than one library.

    Parameters
    ----------
    texts : sequence of sequences of str
        One sequence for each library, none with a text twice.

    Returns
    -------
    kept : list of list of str
        The same without the shared texts, since they have no one right answer.
    """
    owners = Counter(text.casefold() for library_texts in texts for text in library_texts)
    return [
        [text for text in library_texts if owners[text.casefold()] == 1] for library_texts in texts
    ]


def read_splits(
    train_examples: int,
    validation_examples: int,
    test_examples: int,
    shifted_examples: int,
    seed: int,
    files_per_library: int | None = None,
    show_progress: bool = True,
) -> Splits:
    """Read the sources and draw balanced training, validation and test texts.

    Parameters
    ----------
    train_examples, validation_examples, test_examples : int
        Number of texts in each split; the classes' shares differ by one text at most.
    shifted_examples : int
        Number of texts from `SHIFTED_LIBRARY`.
    seed : int
        Seed of the draws.
    files_per_library : int, optional
        Number of source files of a library above which some are left out, drawn at random.
    show_progress : bool, default=True
        Whether to show progress bars.

    Returns
    -------
    splits : Splits
        Disjoint splits; a label is the library's place in `LIBRARIES`.
    """
    libraries = (*LIBRARIES, SHIFTED_LIBRARY)
    found = [read_library(library, seed, files_per_library, show_progress) for library in libraries]
    texts = without_shared([[one.summary for one in of_library] for of_library in found])
    generator = random.Random(seed)
    for library_texts in texts:
        generator.shuffle(library_texts)

    def draw(count: int) -> list[Example]:
        examples = []
        for place in range(count):
            label = place % len(LIBRARIES)
            if not texts[label]:
                raise ValueError(
                    f"The installed {LIBRARIES[label]} has too few docstrings for these sizes; "
                    "ask for fewer examples or more files."
                )
            examples.append((texts[label].pop(), label))
        return examples

    if len(texts[-1]) < shifted_examples:
        raise ValueError(
            f"The installed {SHIFTED_LIBRARY} has only {len(texts[-1])} texts; "
            "ask for fewer of them or more files."
        )
    return Splits(
        train=draw(train_examples),
        validation=draw(validation_examples),
        test=draw(test_examples),
        shifted=texts[-1][:shifted_examples],
    )
