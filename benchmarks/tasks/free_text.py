"""The tasks of free text: a language model reads a description and writes the name.

The texts are real and come from installed sources: first paragraphs of docstrings, for which
the function is to be named, and descriptions of parameters.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.options import Text
from benchmarks.tasks.docstrings import LIBRARIES, read_library
from benchmarks.tasks.parameters import read_parameters

LONGEST = 14  # words of a description


@dataclass(frozen=True)
class Written:
    """A prompt and the answer to it."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class WritingTask:
    """Disjoint sets of texts."""

    name: str
    train: list[Written]
    validation: list[Written]
    test: list[Written]


def functions(options: Text) -> Iterator[Written]:
    """Name the function that a summary documents."""
    for library in LIBRARIES:
        for one in read_library(library, options, options.seed):
            yield Written(f"{one.summary}\nFunction:", f" {one.name}")


def parameters(options: Text) -> Iterator[Written]:
    """Name the parameter that a description is about."""
    for one in read_parameters(options, options.seed):
        yield Written(f"{one.description}\nParameter:", f" {one.name}")


SOURCES: dict[str, Callable[[Text], Iterator[Written]]] = {
    "functions": functions,
    "parameters": parameters,
}


def read(options: Text) -> WritingTask:
    """Draw short descriptions, each of them once.

    Raises
    ------
    ValueError
        If there are too few.
    """
    found = {
        one.prompt.casefold(): one
        for one in SOURCES[options.task](options)
        if len(one.prompt.split()) <= LONGEST
    }
    texts = list(found.values())
    random.Random(options.seed).shuffle(texts)
    sets = []
    for size in (options.train_examples, options.validation_examples, options.test_examples):
        if len(texts) < size:
            raise ValueError(f"{options.task} has only {len(found)} short texts; ask for fewer.")
        sets.append([texts.pop() for _ in range(size)])
    return WritingTask(options.task, *sets)
