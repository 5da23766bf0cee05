"""Tasks made of installed sources: what a docstring's summary documents.

"docstrings" asks for the library, "names" whether a name and a summary belong together, and
"choices" which of four names a summary describes.
"""

import random
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.calibration.paper_prompts import LETTERS, four_choices
from benchmarks.calibration.text_task import Example, TextTask
from benchmarks.docstrings import (
    LIBRARIES,
    SHIFTED_LIBRARY,
    masked,
    read_library,
    read_splits,
)

# One function in so many is kept from the language model for the task that it is tested on.
HELD_OUT = 4
MAXIMUM_WORDS = 40
STEM = 5  # letters in which two words of one stem agree
DOCSTRING_TASKS = ("docstrings", "names", "choices")
NAME_CLASSES = ("another name", "its name")
QUESTION = "Which name does this summary describe?"


@dataclass(frozen=True)
class Sizes:
    """Numbers of texts; with `files_per_library`, of at most so many source files a library."""

    train: int
    test: int
    shifted: int
    files_per_library: int | None = None


class Named(NamedTuple):
    """A function or class: its name as words, its docstring's summary, and the file it is in."""

    name: str
    summary: str
    file: str


def spoken(name: str) -> str:
    """Spell a name as words in lower case: "minimumEdge_cut" is "minimum edge cut".

    Parameters
    ----------
    name : str
        A Python name.

    Returns
    -------
    words : str
        Its words, without library names.
    """
    return masked(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name.replace("_", " "))).lower()


def is_held_out(one: Named) -> bool:
    """Whether a summary is kept from the language model's training, the same in every run."""
    return zlib.crc32(one.summary.casefold().encode()) % HELD_OUT == 0


def read_named(
    library: str, seed: int, files_per_library: int | None, show_progress: bool
) -> list[Named]:
    """Read the summaries of a library that are not too long, with their names as words.

    Parameters
    ----------
    library : str
        Name of the package.
    seed : int
        Seed of the draw of files.
    files_per_library : int, optional
        Number of source files above which some are left out.
    show_progress : bool
        Whether to show a progress bar.

    Returns
    -------
    named : list of Named
        In the order of the sources.
    """
    found = read_library(library, seed, files_per_library, show_progress)
    named = [Named(spoken(one.name), one.summary, str(one.file)) for one in found]
    return [one for one in named if len(one.summary.split()) <= MAXIMUM_WORDS and one.name]


def asked_for_match(pool: Sequence[Named], rng: random.Random) -> Iterator[Example]:
    """Ask whether a name and a summary belong together; wrong names are of the same source file.

    Parameters
    ----------
    pool : sequence of Named
        Functions and classes of one library.
    rng : random.Random
        Draws wrong names.

    Yields
    ------
    example : Example
        Pairs of a name and a summary; every second one belongs together.
    """
    names: dict[str, set[str]] = defaultdict(set)
    for one in pool:
        names[one.file].add(one.name)
    label = 0
    for one in pool:
        others = sorted(names[one.file] - {one.name})
        if others:
            name = one.name if label else rng.choice(others)
            yield Example((name, one.summary), label)
            label = 1 - label


def answerable(pool: Sequence[Named]) -> list[Named]:
    """Keep what a name can be told from: some word of it begins like a word of the summary.

    Parameters
    ----------
    pool : sequence of Named
        Functions and classes.

    Returns
    -------
    kept : list of Named
        Some of them in their order.
    """

    def stems(text: str) -> set[str]:
        return {word[:STEM] for word in re.findall(r"[a-z]{3,}", text.lower())}

    return [one for one in pool if stems(one.name) & stems(one.summary)]


def asked_for_choice(
    asked: Sequence[Named], pool: Sequence[Named], rng: random.Random
) -> Iterator[Example]:
    """Ask which of four names a summary describes.

    Parameters
    ----------
    asked : sequence of Named
        Functions and classes to ask for.
    pool : sequence of Named
        Those of the same library, of which wrong names are drawn.
    rng : random.Random
        Draws wrong names and the order.

    Yields
    ------
    example : Example
        Prompts in the paper's words.
    """
    for one in asked:
        choices = [one.name]
        while len(choices) < len(LETTERS):
            other = rng.choice(pool).name
            if other not in choices:
                choices.append(other)
        rng.shuffle(choices)
        question = f"{QUESTION} {one.summary.lower()}"
        example = four_choices(question, choices, choices.index(one.name))
        assert example is not None
        yield example


def read_docstring_task(name: str, sizes: Sizes, seed: int, show_progress: bool) -> TextTask:
    """Read the installed sources and draw the texts of a task.

    Parameters
    ----------
    name : {"docstrings", "names", "choices"}
        Which library does a summary document; does it describe a function of this name; which of
        four names does it describe?
    sizes : Sizes
        Numbers of texts.
    seed : int
        Seed of the draws.
    show_progress : bool
        Whether to show progress bars.

    Returns
    -------
    task : TextTask
        Disjoint training and test texts, and texts of `SHIFTED_LIBRARY` as shifted ones.
    """
    if name == "docstrings":
        splits = read_splits(
            sizes.train, 0, sizes.test, sizes.shifted, seed, sizes.files_per_library, show_progress
        )
        train, test = ([Example(*one) for one in part] for part in (splits.train, splits.test))
        shifted = [Example(text, None) for text in splits.shifted]
        return TextTask(name, LIBRARIES, False, train, test, {SHIFTED_LIBRARY: shifted})

    rng = random.Random(seed)
    examples = {}
    for library in (*LIBRARIES, SHIFTED_LIBRARY):
        pool = read_named(library, seed, sizes.files_per_library, show_progress)
        rng.shuffle(pool)
        if name == "names":
            examples[library] = list(asked_for_match(pool, rng))
        else:
            pool = [one for one in answerable(pool) if is_held_out(one)]
            examples[library] = list(asked_for_choice(pool, pool, rng))
    shifted = examples.pop(SHIFTED_LIBRARY)[: sizes.shifted]
    drawn = [one for of_library in examples.values() for one in of_library]
    rng.shuffle(drawn)
    if len(drawn) < sizes.train + sizes.test:
        raise ValueError(
            f"The installed sources give {len(drawn)} texts for the task {name!r}; ask for fewer."
        )
    return TextTask(
        name,
        NAME_CLASSES if name == "names" else LETTERS,
        name == "choices",
        drawn[: sizes.train],
        drawn[sizes.train : sizes.train + sizes.test],
        {SHIFTED_LIBRARY: shifted},
    )
