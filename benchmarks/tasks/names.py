"""Tasks of names: whether one fits a summary, and which of four does."""

import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import models
from benchmarks.options import TextRun
from benchmarks.tasks.balanced import ENCODER
from benchmarks.tasks.docstrings import (
    LIBRARIES,
    SHIFTED_LIBRARY,
    Documented,
    masked,
    read_library,
)
from benchmarks.tasks.paper import CAUSAL_HYPERPARAMETERS, LETTERS, four_choices
from benchmarks.tasks.task import Example, Sizes, Task
from benchmarks.training import Hyperparameters

MAXIMUM_WORDS = 40
VERDICTS = ("another name", "its name")
QUESTION = "Which name does this summary describe?"
HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")  # between the words of "minimumEdge"


def spoken(name: str) -> str:
    """Spell a name as words in lower case: "minimumEdge_cut" is "minimum edge cut"."""
    words = HUMP.sub(" ", name.replace("_", " "))
    return masked(words).lower()


def asked_for_match(
    pool: Sequence[Documented], rng: random.Random
) -> Iterator[Example]:
    """Pair names and summaries: every second pair is right, others mix a file."""
    names: dict[Path, set[str]] = defaultdict(set)
    for one in pool:
        names[one.file].add(one.name)
    label = 0
    for one in pool:
        # Sets have an order of their own in every process; a draw needs the same one.
        others = sorted(names[one.file] - {one.name})
        if not others:
            continue
        name = one.name if label else rng.choice(others)
        yield Example((name, one.summary), label)
        # Both classes come by turns, and are equally many.
        label = 1 - label


def asked_for_choice(
    pool: Sequence[Documented], rng: random.Random
) -> Iterator[Example]:
    """Ask in the paper's words which of four names from one library fits a summary."""
    names = sorted({one.name for one in pool})
    for one in pool:
        # One more than are needed, for the case that the right one is among them.
        drawn = rng.sample(names, len(LETTERS))
        wrong = [name for name in drawn if name != one.name]
        choices = [one.name, *wrong[: len(LETTERS) - 1]]
        rng.shuffle(choices)
        example = four_choices(
            question=f"{QUESTION} {one.summary.lower()}",
            choices=choices,
            label=choices.index(one.name),
        )
        assert example is not None
        yield example


@dataclass(frozen=True)
class OfNames:
    """A task of questions about the functions and classes of all libraries."""

    name: str
    classes: Sequence[str]
    is_prompt: bool
    ask: Callable[[Sequence[Documented], random.Random], Iterator[Example]]
    sizes: Sizes
    hyperparameters: Hyperparameters

    def read(self, options: TextRun, seed: int) -> Task:
        """Draw questions about all libraries but one, and shifted ones about that."""
        sizes = self.sizes.asked(options)
        rng = random.Random(seed)
        examples = {}
        for library in (*LIBRARIES, SHIFTED_LIBRARY):
            pool = short_and_spoken(read_library(library, options, seed))
            rng.shuffle(pool)
            examples[library] = list(self.ask(pool, rng))
        shifted = examples.pop(SHIFTED_LIBRARY)
        drawn = [one for of_library in examples.values() for one in of_library]
        rng.shuffle(drawn)
        end = sizes.train + sizes.test
        if len(drawn) < end:
            raise ValueError(
                f"The task {self.name} has only {len(drawn)} texts; ask for fewer."
            )
        return Task(
            name=self.name,
            classes=self.classes,
            is_prompt=self.is_prompt,
            train=drawn[: sizes.train],
            test=drawn[sizes.train : end],
            shifted={SHIFTED_LIBRARY: shifted[: sizes.shifted]},
            # A prompt ends with the choices, without which nobody could answer.
            truncation_side="left" if self.is_prompt else "right",
        )


def short_and_spoken(documented: Sequence[Documented]) -> list[Documented]:
    """Keep short summaries of things whose names can be spelled as words."""
    pool = []
    for one in documented:
        name = spoken(one.name)
        if name and len(one.summary.split()) <= MAXIMUM_WORDS:
            pool.append(one._replace(name=name))
    return pool


NAMES = OfNames(
    name="names",
    classes=VERDICTS,
    is_prompt=False,
    ask=asked_for_match,
    # Two classes need more texts than many, as in the comparisons of links, and twice
    # the texts need longer until a model is as sure of them.
    sizes=Sizes(train=1000, test=500, shifted=200),
    hyperparameters=replace(ENCODER, steps=630),
)
GEMMA = replace(
    CAUSAL_HYPERPARAMETERS,
    model=models.GEMMA,
    target_modules=("q_proj", "v_proj"),
    batch_size=8,
    learning_rate=1e-3,
    steps=200,
    checkpoints=4,
    warmup_steps=20,
)
CHOICES = OfNames(
    name="choices",
    classes=LETTERS,
    is_prompt=True,
    ask=asked_for_choice,
    sizes=Sizes(train=200, test=500, shifted=50),
    hyperparameters=GEMMA,
)
