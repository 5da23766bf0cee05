"""A task as texts and labels, before any tokenizer or model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


class Example(NamedTuple):
    """A text, or a pair of texts for an encoder, with its class; None where no class is right."""

    text: str | tuple[str, str]
    label: int | None


@dataclass(frozen=True)
class TextTask:
    """What a model is fine-tuned on and measured with.

    Attributes
    ----------
    name : str
        What the command line calls it.
    classes : sequence of str
        Names of the classes in the order of the labels. For a causal language model they are
        the answers, of which each must be one token after the prompt.
    is_prompt : bool
        Whether a text is the prompt of a causal language model, which ends where the answer
        begins; otherwise it is for an encoder with a classification head.
    train, test : sequence of Example
        Texts with labels.
    shifted : mapping of str to sequence of Example
        Texts of other distributions by their names.
    truncation_side : {"right", "left"}
        Side at which a text that is too long is cut.
    """

    name: str
    classes: Sequence[str]
    is_prompt: bool
    train: Sequence[Example]
    test: Sequence[Example]
    shifted: dict[str, Sequence[Example]] = field(default_factory=dict)
    truncation_side: Literal["right", "left"] = "right"
