"""The tasks names and choices: whether a name fits a summary, and which of four names does."""

import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.models import encoder_folder, gemma_folder
from benchmarks.options import TextRun
from benchmarks.tasks.balanced import ENCODER
from benchmarks.tasks.docstrings import (
    LIBRARIES,
    SHIFTED_LIBRARY,
    Documented,
    masked,
    read_library,
)
from benchmarks.tasks.paper import CAUSAL_HYPERPARAMETERS
from benchmarks.tasks.paper_prompts import LETTERS, four_choices
from benchmarks.tasks.task import Example, Sizes, Task
from benchmarks.training import Hyperparameters

MAXIMUM_WORDS = 40
VERDICTS = ("another name", "its name")
QUESTION = "Which name does this summary describe?"


def spoken(name: str) -> str:
    """Spell a name as words in lower case: "minimumEdge_cut" is "minimum edge cut"."""
    return masked(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name.replace("_", " "))).lower()


def asked_for_match(pool: Sequence[Documented], rng: random.Random) -> Iterator[Example]:
    """Pair names and summaries: every second pair is right, the others mix names of one file."""
    names: dict[Path, set[str]] = defaultdict(set)
    for one in pool:
        names[one.file].add(one.name)
    label = 0
    for one in pool:
        others = sorted(names[one.file] - {one.name})
        if others:
            name = one.name if label else rng.choice(others)
            yield Example((name, one.summary), label)
            label = 1 - label


def asked_for_choice(pool: Sequence[Documented], rng: random.Random) -> Iterator[Example]:
    """Ask in the paper's words which of four names from one library fits a summary."""
    names = sorted({one.name for one in pool})
    for one in pool:
        drawn = rng.sample(names, len(LETTERS))
        choices = [one.name, *(name for name in drawn if name != one.name)][: len(LETTERS)]
        rng.shuffle(choices)
        question = f"{QUESTION} {one.summary.lower()}"
        example = four_choices(question, choices, choices.index(one.name))
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

    def model(self, options: TextRun) -> str | Path:
        if self.is_prompt:
            return options.model or gemma_folder(options.cache)
        return encoder_folder()

    def read(self, options: TextRun, seed: int) -> Task:
        rng, asked = random.Random(seed), self.sizes.asked(options)
        examples = {}
        for library in (*LIBRARIES, SHIFTED_LIBRARY):
            found = read_library(library, options, seed)
            named = [one._replace(name=spoken(one.name)) for one in found]
            pool = [x for x in named if len(x.summary.split()) <= MAXIMUM_WORDS and x.name]
            rng.shuffle(pool)
            examples[library] = list(self.ask(pool, rng))
        shifted = examples.pop(SHIFTED_LIBRARY)[: asked.shifted]
        drawn = [one for of_library in examples.values() for one in of_library]
        rng.shuffle(drawn)
        tested = asked.train + asked.test
        if len(drawn) < tested:
            raise ValueError(f"The task {self.name} has only {len(drawn)} texts; ask for fewer.")
        train, test = drawn[: asked.train], drawn[asked.train : tested]
        sets = (train, test, {SHIFTED_LIBRARY: shifted})
        side = "left" if self.is_prompt else "right"
        return Task(self.name, self.classes, self.is_prompt, *sets, truncation_side=side)


# Two classes need more texts than many, as in the comparisons of links, and twice the texts need
# longer until a model is as sure of them.
LONGER = replace(ENCODER, steps=630)
NAMES = OfNames("names", VERDICTS, False, asked_for_match, Sizes(1000, 500, 200), LONGER)
GEMMA = replace(
    CAUSAL_HYPERPARAMETERS,
    model="gemma-3-270m",
    target_modules=("q_proj", "v_proj"),
    batch_size=8,
    learning_rate=1e-3,
    steps=200,
    checkpoints=4,
    warmup_steps=20,
)
CHOICES = OfNames("choices", LETTERS, True, asked_for_choice, Sizes(200, 500, 50), GEMMA)
