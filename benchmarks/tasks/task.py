"""What a task is: texts and labels, before any tokenizer or model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from benchmarks.options import TextRun


class Example(NamedTuple):
    """A text, or a pair of texts for an encoder, and its class; None if no class is right."""

    text: str | tuple[str, str]
    label: int | None


@dataclass(frozen=True)
class Task:
    """Texts to fine-tune a model on and to measure it with; a prompt's classes are its answers."""

    name: str
    classes: Sequence[str]
    is_prompt: bool
    train: Sequence[Example]
    test: Sequence[Example]
    shifted: Mapping[str, Sequence[Example]] = field(default_factory=dict)
    truncation_side: Literal["right", "left"] = "right"


class Sizes(NamedTuple):
    """Numbers of texts."""

    train: int
    test: int
    shifted: int = 0

    def asked(self, options: TextRun) -> "Sizes":
        """The numbers that the options ask for; these where they ask for none."""
        train, test = options.train_examples or self.train, options.test_examples or self.test
        return Sizes(train, test, options.shifted_examples or self.shifted)
