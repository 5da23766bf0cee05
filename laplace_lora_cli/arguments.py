"""Arguments of the commands, a dataclass each, for `transformers.HfArgumentParser`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

TEXT = "text"
LABEL = "label"
"""Columns of texts and labels, where nobody names others."""


def _argument(
    text: str,
    default: Any = None,
    **keywords: Any,
) -> Any:
    """Make a field with a help text."""
    return field(default=default, metadata={"help": text}, **keywords)


@dataclass(kw_only=True)
class Arguments:
    """What all commands take."""

    debug: bool = _argument("show where in the code an error comes from", False)


@dataclass(kw_only=True)
class TextArguments:
    """How texts and labels are read, which a posterior's file holds too."""

    class_names: list[str] | None = _argument(
        "names of the classes in the order of the model's outputs, where labels are "
        "names that the model's configuration does not know"
    )
    answers: list[str] | None = _argument(
        "answers of a causal language model as they stand behind the texts, such as A "
        "B C D, with a space in front where there is one"
    )
    labels_are: Literal["names", "numbers"] | None = _argument(
        "how labels are written, where names of classes are numbers too"
    )
    text_column: str | None = _argument(f"column of the texts; {TEXT!r} by default")
    label_column: str | None = _argument(f"column of the labels; {LABEL!r} by default")
    max_length: int | None = _argument("tokens to keep of a text; all by default")


@dataclass(kw_only=True)
class ModelArguments(Arguments, TextArguments):
    """Which adapter, and how it is loaded."""

    adapter: str = field(metadata={"help": "folder or hub name of a LoRA adapter"})
    dtype: str = _argument("precision of the base model's weights", "auto")
    device_map: str | None = _argument("as for from_pretrained, such as auto or cuda:0")
    load_in_4bit: bool = _argument(
        "load the base model in 4 bits by bitsandbytes", False
    )
    batch_size: int = _argument("texts in a batch", 8)


@dataclass(kw_only=True)
class PosteriorArguments(ModelArguments):
    """A posterior that `calibrate` has saved. Its file says how texts are read."""

    posterior: str | None = _argument(
        "folder of the posterior; the adapter's by default"
    )


@dataclass(kw_only=True)
class CalibrateArguments(ModelArguments):
    """Fit a posterior around an adapter, choose its prior, and save it beside it.

    laplace-lora calibrate --adapter out/ --train train.jsonl --validation
    validation.jsonl
    """

    train: str = field(
        metadata={"help": "texts of the training: CSV, JSON lines or a hub name"}
    )
    validation: str | None = _argument(
        "held-out texts, which choose the prior; without them, agreement chooses it"
    )
    output: str | None = _argument("folder for the posterior; the adapter's by default")
    overwrite: bool = _argument("replace a posterior that exists", False)


@dataclass(kw_only=True)
class PredictArguments(PosteriorArguments):
    """Predict texts with a posterior that `calibrate` has saved, as lines of JSON.

    laplace-lora predict --adapter out/ --data new.jsonl --output predictions.jsonl
    """

    data: str = field(metadata={"help": "texts: CSV, JSON lines or a hub name"})
    output: str = field(metadata={"help": "file of JSON lines"})
    amortized: bool = _argument(
        "by one forward pass a text, with variances that are learnt from --train", False
    )
    train: str | None = _argument(
        "training texts, to learn variances from, where none are saved"
    )
    resume: bool = _argument("go on where an interrupted run has stopped", False)


@dataclass(kw_only=True)
class ReportArguments(PosteriorArguments):
    """Measure a posterior on labelled texts, as one page of HTML.

    laplace-lora report --adapter out/ --data test.jsonl --output report.html
    """

    data: str = field(
        metadata={"help": "texts with labels: CSV, JSON lines or a hub name"}
    )
    output: str = field(metadata={"help": "file of HTML"})
    title: str = _argument("of the page", "Calibration report")
    overwrite: bool = _argument("replace a page that exists", False)


@dataclass(kw_only=True)
class DistillArguments(PosteriorArguments):
    """Train a student: an ordinary adapter with the posterior's probabilities.

    laplace-lora distill --adapter out/ --train train.jsonl --output student/
    """

    train: str = field(
        metadata={"help": "texts to learn from: CSV, JSON lines or a hub name"}
    )
    output: str = field(metadata={"help": "folder for the student"})
    epochs: float = _argument(
        "passes of the adapter's own training; a student takes three tenths", 3.0
    )
    learning_rate: float = _argument("of the adapter's own training", 1e-4)
    seed: int = _argument("of the training", 0)


@dataclass(kw_only=True)
class DemoArguments(Arguments):
    """Show in two minutes what a posterior is for, on texts of installed libraries.

    laplace-lora demo
    """

    output: str = _argument("file of HTML with the pictures", "laplace_lora_demo.html")
    seed: int = _argument("of the texts and the training", 0)
