"""What a task is: texts and labels, before any tokenizer or model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from benchmarks.options import TextRun

Side = Literal["left", "right"]


class Example(NamedTuple):
    """A text, or a pair for an encoder, and its class; None if none is right.

    A prompt may have choices of its own, texts that stand behind it.
    """

    text: str | tuple[str, str]
    label: int | None
    choices: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Task:
    """Texts to train on and to measure with; prompts' classes are answers."""

    name: str
    classes: Sequence[str]
    is_prompt: bool
    train: Sequence[Example]
    test: Sequence[Example]
    shifted: Mapping[str, Sequence[Example]] = field(default_factory=dict)
    # Labelled texts that nobody trains on, of all classes as they come.
    further: Sequence[Example] = ()
    truncation_side: Side = "right"  # where a text is cut that is too long

    # A task's examples are all of one kind: the first tells which.

    @property
    def has_choices(self) -> bool:
        """Tell whether each prompt has choices of its own."""
        return self.train[0].choices is not None


class Sizes(NamedTuple):
    """Numbers of texts."""

    train: int
    test: int
    shifted: int = 0

    def asked(self, options: TextRun) -> "Sizes":
        """Return the numbers that options ask for, or else these."""
        # None asks for nothing, and 0 is no number of texts that could be asked for.
        return Sizes(
            train=options.train_examples or self.train,
            test=options.test_examples or self.test,
            shifted=options.shifted_examples or self.shifted,
        )
