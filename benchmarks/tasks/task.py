"""What a task is: texts and labels, before any tokenizer or model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from benchmarks.options import TextRun

Side = Literal["left", "right"]
UNLABELLED = -100  # of a word without a label, as transformers has it


class Example(NamedTuple):
    """A text, or a pair for an encoder, and its class; None if none is right.

    Of a regression the label is the number to predict.
    A prompt may have choices of its own, texts that stand behind it. Each word of a
    text, between spaces, may have a class of its own. Of several labels each is 1 where
    it is right.
    """

    text: str | tuple[str, str]
    label: float | None
    choices: tuple[str, ...] | None = None
    word_labels: tuple[int, ...] | None = None
    labels: tuple[int, ...] | None = None

    @property
    def identity(self) -> object:
        """Return what no two examples share: the labelled words, or the text."""
        if self.word_labels is None:
            return self.text
        # Many functions have the same parameters, whose types would be known by heart.
        return self.labelled_words

    @property
    def labelled_words(self) -> tuple[str, ...]:
        """List the words that have a class."""
        assert isinstance(self.text, str)  # a pair has no classes of words
        assert self.word_labels is not None
        words = self.text.split()
        pairs = zip(words, self.word_labels, strict=True)
        return tuple(word for word, label in pairs if label != UNLABELLED)


@dataclass(frozen=True)
class Task:
    """Texts to train on and to measure with; prompts' classes are answers."""

    name: str
    classes: Sequence[str]
    is_prompt: bool
    train: Sequence[Example]
    test: Sequence[Example]
    shifted: Mapping[str, Sequence[Example]] = field(default_factory=dict)
    truncation_side: Side = "right"  # where a text is cut that is too long

    # A task's examples are all of one kind: the first tells which.

    @property
    def has_choices(self) -> bool:
        """Tell whether each prompt has choices of its own."""
        return self.train[0].choices is not None

    @property
    def labels_words(self) -> bool:
        """Tell whether classes are those of words."""
        return self.train[0].word_labels is not None

    @property
    def has_several_labels(self) -> bool:
        """Tell whether each class is right or wrong by itself."""
        return self.train[0].labels is not None


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
