"""Tasks with as many texts of each class in each of their disjoint sets."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from benchmarks.models import encoder_folder
from benchmarks.options import TextRun
from benchmarks.tasks.task import Example, Sizes, Task, TaskSource
from benchmarks.training import Hyperparameters

LEARNING: Any = {"learning_rate": 2e-3, "steps": 375, "checkpoints": 5, "warmup_steps": 20}
ENCODER = Hyperparameters("all-MiniLM-L6-v2", ("query", "value"), 16, 32, **LEARNING)

PAIRS = replace(ENCODER, maximum_length=48, steps=400)

Text = str | tuple[str, str]
Found = Iterable[tuple[str, Text]]  # each text with its class, in the order of the sources


def balanced(
    name: str,
    classes: Sequence[str],
    sizes: Sizes,
    find: Callable[[TextRun, int], Found],
    shifted: str | None = None,
    settings: Hyperparameters = ENCODER,
) -> TaskSource:
    """A task for the encoder; `find(options, seed)` yields the same texts in every run."""

    def read(options: TextRun, seed: int, validation: int) -> Task:
        asked = sizes.asked(options, validation)
        return draw_balanced(name, find(options, seed), classes, asked, seed, shifted)

    return TaskSource(name, read, lambda _: encoder_folder(), settings)


def draw_balanced(
    name: str,
    found: Found,
    classes: Sequence[str],
    sizes: Sizes,
    seed: int,
    shifted: str | None = None,
) -> Task:
    """Draw disjoint sets for a task, with equal numbers of texts from each class.

    `shifted` is the class of texts from another distribution. Texts found in more than one class
    have no right answer and are left out.
    """
    by_class: dict[str | None, dict[Text, Text]] = {key: {} for key in (*classes, shifted)}
    for key, text in found:
        if key in by_class:
            by_class[key][_folded(text)] = text
    owners = Counter(chain.from_iterable(by_class.values()))
    left = {
        key: [text for folded, text in texts.items() if owners[folded] == 1]
        for key, texts in by_class.items()
    }
    generator = random.Random(seed)
    for texts in left.values():
        generator.shuffle(texts)

    def draw(count: int) -> list[Example]:
        labels = [place % len(classes) for place in range(count)]
        for label, asked in Counter(labels).items():
            if asked > len(left[classes[label]]):
                raise ValueError(f"{classes[label]} has too few texts; ask for fewer.")
        return [Example(left[classes[label]].pop(), label) for label in labels]

    others = {}
    if shifted is not None:
        if len(left[shifted]) < sizes.shifted:
            raise ValueError(f"{shifted} has only {len(left[shifted])} texts; ask for fewer.")
        others[shifted] = [Example(text, None) for text in left[shifted][: sizes.shifted]]
    train, validation, test = (draw(size) for size in sizes[:3])
    return Task(name, classes, False, train, test, others, validation)


def _folded(text: Text) -> Text:
    return text.casefold() if isinstance(text, str) else (text[0].casefold(), text[1].casefold())
