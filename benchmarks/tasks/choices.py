"""The task choices: a causal language model says which of four names fits a summary."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.options import TextRun
from benchmarks.tasks.balanced import ENCODER
from benchmarks.tasks.language_model import language_model
from benchmarks.tasks.named import Named, answerable, asked_for_choice, draw, is_held_out
from benchmarks.tasks.paper_prompts import LETTERS
from benchmarks.tasks.task import Example, Sizes, Task, TaskSource


def ask(pool: list[Named], rng: random.Random) -> Iterator[Example]:
    """Ask about functions that the language model wasn't trained on."""
    held_out = [one for one in answerable(pool) if is_held_out(one)]
    return asked_for_choice(held_out, held_out, rng)


def read(options: TextRun, seed: int, validation: int) -> Task:
    """Draw as many questions as the options ask for."""
    sizes = Sizes(500, 0, 500, 200).asked(options, validation)
    return draw(options, seed, sizes, ask, Task("choices", LETTERS, True, (), ()))


LAYERS = ("q_proj", "v_proj", "lm_head")
MODEL: Any = {"model": "docstring language model", "target_modules": LAYERS}
FINE_TUNING = replace(ENCODER, **MODEL, maximum_length=128, learning_rate=5e-3)
TASK = TaskSource("choices", read, language_model, FINE_TUNING)
