"""Tasks with as many texts of each class in each of their disjoint sets."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
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
    keys = [*classes, *([] if shifted is None else [shifted])]
    by_class: dict[str, list[Text]] = {key: [] for key in keys}
    for key, text in found:
        by_class.get(key, []).append(text)
    owners = Counter(text for texts in by_class.values() for text in {*map(_folded, texts)})
    left = [
        list({_folded(text): text for text in texts if owners[_folded(text)] == 1}.values())
        for texts in by_class.values()
    ]
    generator = random.Random(seed)
    for texts in left:
        generator.shuffle(texts)

    def draw(count: int) -> list[Example]:
        examples = []
        for place in range(count):
            label = place % len(classes)
            if not left[label]:
                raise ValueError(f"{classes[label]} has too few texts; ask for fewer.")
            examples.append(Example(left[label].pop(), label))
        return examples

    others = {}
    if shifted is not None:
        if len(left[-1]) < sizes.shifted:
            raise ValueError(f"{shifted} has only {len(left[-1])} texts; ask for fewer.")
        others[shifted] = [Example(text, None) for text in left[-1][: sizes.shifted]]
    train, validation, test = (draw(size) for size in sizes[:3])
    return Task(name, classes, False, train, test, others, validation)


def _folded(text: Text) -> Text:
    return text.casefold() if isinstance(text, str) else (text[0].casefold(), text[1].casefold())
