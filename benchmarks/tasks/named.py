"""Functions and classes with their names as words, and what tasks about them share."""

import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.options import TextRun
from benchmarks.tasks.docstrings import LIBRARIES, SHIFTED_LIBRARY, masked, read_library
from benchmarks.tasks.paper_prompts import LETTERS, four_choices
from benchmarks.tasks.task import Example, Sizes, Task

# One function in this many is kept out of the language model's training, for its test.
HELD_OUT = 4
MAXIMUM_WORDS = 40
STEM = 5  # letters that two words of one stem share
QUESTION = "Which name does this summary describe?"


class Named(NamedTuple):
    """A function or class: its name as words, its docstring's summary, and the file it is in."""

    name: str
    summary: str
    file: str


Ask = Callable[[list[Named], random.Random], Iterator[Example]]


def spoken(name: str) -> str:
    """Spell a name as words in lower case: "minimumEdge_cut" is "minimum edge cut"."""
    return masked(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name.replace("_", " "))).lower()


def is_held_out(one: Named) -> bool:
    """Whether a summary is kept out of the language model's training, in every run alike."""
    return zlib.crc32(one.summary.casefold().encode()) % HELD_OUT == 0


def read_named(library: str, options: TextRun, seed: int) -> list[Named]:
    """Read the summaries in a library that aren't too long, in the order of the sources."""
    found = read_library(library, options, seed)
    named = [Named(spoken(one.name), one.summary, str(one.file)) for one in found]
    return [one for one in named if len(one.summary.split()) <= MAXIMUM_WORDS and one.name]


def answerable(pool: Sequence[Named]) -> list[Named]:
    """Keep those with a hint: a word of the name begins like a word of the summary."""

    def stems(text: str) -> set[str]:
        return {word[:STEM] for word in re.findall(r"[a-z]{3,}", text.lower())}

    return [one for one in pool if stems(one.name) & stems(one.summary)]


def asked_for_choice(
    asked: Sequence[Named], pool: Sequence[Named], rng: random.Random
) -> Iterator[Example]:
    """Ask in the paper's words which of four names from the pool fits a summary."""
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


def draw(options: TextRun, seed: int, sizes: Sizes, ask: Ask, task: Task) -> Task:
    """Fill a task with questions about each library's functions and classes."""
    rng = random.Random(seed)
    examples = {}
    for library in (*LIBRARIES, SHIFTED_LIBRARY):
        pool = read_named(library, options, seed)
        rng.shuffle(pool)
        examples[library] = list(ask(pool, rng))
    shifted = examples.pop(SHIFTED_LIBRARY)[: sizes.shifted]
    drawn = [one for of_library in examples.values() for one in of_library]
    rng.shuffle(drawn)
    tested = sizes.train + sizes.test
    if len(drawn) < tested + sizes.validation:
        raise ValueError(f"The task {task.name} has only {len(drawn)} texts; ask for fewer.")
    train, test = drawn[: sizes.train], drawn[sizes.train : tested]
    sets = {"train": train, "test": test, "validation": drawn[tested : tested + sizes.validation]}
    return replace(task, **sets, shifted={SHIFTED_LIBRARY: shifted})
