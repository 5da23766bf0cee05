"""The task choices: a pretrained language model says which of four names fits a summary."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.gemma import gemma_folder
from benchmarks.options import TextRun
from benchmarks.tasks.named import Named, draw
from benchmarks.tasks.paper import CAUSAL_HYPERPARAMETERS
from benchmarks.tasks.paper_prompts import LETTERS, four_choices
from benchmarks.tasks.task import Example, Sizes, Task, TaskSource

QUESTION = "Which name does this summary describe?"


def asked_for_choice(pool: Sequence[Named], rng: random.Random) -> Iterator[Example]:
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


def read(options: TextRun, seed: int, validation: int) -> Task:
    """Draw as many questions as the options ask for."""
    sizes = Sizes(200, 0, 500, 50).asked(options, validation)
    empty = Task("choices", LETTERS, True, (), (), truncation_side="left")
    return draw(options, seed, sizes, asked_for_choice, empty)


def model(options: TextRun) -> str | Path:
    """The model asked for, or Gemma 3 270M."""
    return options.model or gemma_folder(options.cache)


LEARNING = {"learning_rate": 1e-3, "steps": 200, "checkpoints": 4, "warmup_steps": 20}
FINE_TUNING = replace(
    CAUSAL_HYPERPARAMETERS,
    model="gemma-3-270m",
    target_modules=("q_proj", "v_proj"),
    batch_size=8,
    **LEARNING,
)
TASK = TaskSource("choices", read, model, FINE_TUNING)
