"""Tasks with as many texts of each class in each of their disjoint sets."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.models import encoder_folder
from benchmarks.options import TextRun
from benchmarks.tasks.task import Example, Sizes, Task
from benchmarks.training import Hyperparameters

LEARNING: Any = {"learning_rate": 2e-3, "steps": 375, "checkpoints": 5, "warmup_steps": 20}
ENCODER = Hyperparameters("all-MiniLM-L6-v2", ("query", "value"), 16, 32, **LEARNING)

PAIRS = replace(ENCODER, maximum_length=48, steps=400)

Text = str | tuple[str, str]
Found = Iterable[tuple[str, Text]]  # each text with its class, in the order of the sources


@dataclass(frozen=True)
class Balanced:
    """A task for the encoder; `find(options, seed)` yields the same texts in every run."""

    name: str
    classes: Sequence[str]
    sizes: Sizes
    find: Callable[[Any, int], Found]
    hyperparameters: Hyperparameters = ENCODER
    shifted: str | None = None  # class of texts from another distribution

    def model(self, _: TextRun) -> Path:
        return encoder_folder()

    def read(self, options: TextRun, seed: int) -> Task:
        return self.draw(options, seed, self.sizes.asked(options))

    def draw(self, options: Any, seed: int, sizes: Sizes) -> Task:
        """Draw disjoint sets of these sizes, with equal numbers of texts from each class.

        Texts found in more than one class have no right answer and are left out.
        """
        by_class: dict[Any, dict[str, Text]] = {key: {} for key in (*self.classes, self.shifted)}
        for key, text in self.find(options, seed):
            if key in by_class:
                by_class[key][str(text).casefold()] = text
        owners = Counter(chain.from_iterable(by_class.values()))
        left = {
            key: [text for folded, text in texts.items() if owners[folded] == 1]
            for key, texts in by_class.items()
        }
        generator = random.Random(seed)
        for texts in left.values():
            generator.shuffle(texts)

        def draw(count: int) -> list[Example]:
            labels = [place % len(self.classes) for place in range(count)]
            for label, asked in Counter(labels).items():
                if asked > len(left[self.classes[label]]):
                    raise ValueError(f"{self.classes[label]} has too few texts; ask for fewer.")
            return [Example(left[self.classes[label]].pop(), label) for label in labels]

        others = {}
        if self.shifted is not None:
            found = left[self.shifted]
            if len(found) < sizes.shifted:
                raise ValueError(f"{self.shifted} has only {len(found)} texts; ask for fewer.")
            others[self.shifted] = [Example(text, None) for text in found[: sizes.shifted]]
        train, test = map(draw, (sizes.train, sizes.test))
        return Task(self.name, self.classes, False, train, test, others)
