"""The task choices: a causal language model says which of four names a summary describes."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.options import TextOptions
from benchmarks.tasks.docstrings import ENCODER
from benchmarks.tasks.language_model import LanguageModelSettings, language_model_folder
from benchmarks.tasks.named import Named, answerable, asked_for_choice, draw, is_held_out
from benchmarks.tasks.paper_prompts import LETTERS
from benchmarks.tasks.task import Example, Task, TaskSource, sizes_of

LANGUAGE_MODEL = replace(
    ENCODER,
    model="docstring language model",
    target_modules=("q_proj", "v_proj", "lm_head"),
    maximum_length=128,
    learning_rate=5e-3,
)


def ask(pool: list[Named], rng: random.Random) -> Iterator[Example]:
    """Ask about what the language model has not been trained on."""
    held_out = [one for one in answerable(pool) if is_held_out(one)]
    return asked_for_choice(held_out, held_out, rng)


def read(options: TextOptions, seed: int, validation: int) -> Task:
    """Draw the questions that the options ask for."""
    sizes = sizes_of(options, validation, train=500, test=500, shifted=200)
    return draw(options, seed, sizes, ask, Task("choices", LETTERS, True, (), ()))


def model(options: TextOptions) -> Path:
    """Train the language model, or find it in the cache."""
    settings = LanguageModelSettings(files_per_library=options.files_per_library)
    if options.language_model_steps is not None:
        settings = replace(settings, steps=options.language_model_steps)
    return language_model_folder(settings, options.cache, not options.quiet)


TASK = TaskSource("choices", read, model, LANGUAGE_MODEL)
