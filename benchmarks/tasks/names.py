"""The task names: whether a docstring's summary describes a function of this name."""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.models import encoder_folder
from benchmarks.options import TextRun
from benchmarks.tasks.balanced import ENCODER
from benchmarks.tasks.named import Named, draw
from benchmarks.tasks.task import Example, Sizes, Task, TaskSource

CLASSES = ("another name", "its name")


def asked_for_match(pool: Sequence[Named], rng: random.Random) -> Iterator[Example]:
    """Pair names and summaries: every second pair is right, the others mix names of one file."""
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


def read(options: TextRun, seed: int, validation: int) -> Task:
    """Draw as many pairs as the options ask for."""
    # Two classes need more texts than many, as in the comparisons of links.
    sizes = Sizes(1000, 0, 500, 200).asked(options, validation)
    return draw(options, seed, sizes, asked_for_match, Task("names", CLASSES, False, (), ()))


# Twice the texts need longer until a model is as sure of them.
TASK = TaskSource("names", read, lambda options: encoder_folder(), replace(ENCODER, steps=630))
