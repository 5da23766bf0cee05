"""What a task is: texts and labels, before any tokenizer or model, and how it is fine-tuned."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.options import TextOptions
from benchmarks.training import Hyperparameters


class Example(NamedTuple):
    """A text, or a pair of texts for an encoder, with its class; None where no class is right."""

    text: str | tuple[str, str]
    label: int | None


@dataclass(frozen=True)
class Task:
    """What a model is fine-tuned on and measured with.

    `classes` are in the order of the labels. Where texts are prompts of a causal language model,
    they are the answers, of which each must be one token after the prompt.
    """

    name: str
    classes: Sequence[str]
    is_prompt: bool
    train: Sequence[Example]
    test: Sequence[Example]
    shifted: dict[str, Sequence[Example]] = field(default_factory=dict)
    validation: Sequence[Example] = ()
    truncation_side: Literal["right", "left"] = "right"


class Sizes(NamedTuple):
    """Numbers of texts."""

    train: int
    validation: int
    test: int
    shifted: int


@dataclass(frozen=True)
class TaskSource:
    """A task by its name: how it is read, and which model is fine-tuned on it and how.

    `read` takes the options, a seed and a number of validation texts; `model` the options, and
    returns the folder of an own model, or a hub's name or a user's folder as text.
    """

    name: str
    read: Callable[[TextOptions, int, int], Task]
    model: Callable[[TextOptions], str | Path]
    hyperparameters: Hyperparameters


def sizes_of(options: TextOptions, validation: int, train: int, test: int, shifted: int) -> Sizes:
    """Numbers of texts that the options ask for, where not given the task's own."""
    return Sizes(
        options.train_examples or train,
        validation,
        options.test_examples or test,
        options.shifted_examples or shifted,
    )


def split(drawn: Sequence[Any], sizes: Sizes) -> dict[str, Sequence[Any]]:
    """Cut a list into training, test and validation examples, in this order."""
    tested = sizes.train + sizes.test
    return {
        "train": drawn[: sizes.train],
        "test": drawn[sizes.train : tested],
        "validation": drawn[tested : tested + sizes.validation],
    }
