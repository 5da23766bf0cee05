"""Arguments of the commands, a dataclass each, for `transformers.HfArgumentParser`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _argument(
    text: str,
    default: Any = None,
    **keywords: Any,
) -> Any:
    """Make a field with a help text."""
    return field(default=default, metadata={"help": text}, **keywords)


@dataclass(kw_only=True)
class ModelArguments:
    """Which adapter, and how it is loaded."""

    adapter: str = field(metadata={"help": "folder or hub name of a LoRA adapter"})
    dtype: str = _argument("precision of the base model's weights", "auto")
    device_map: str | None = _argument("as for from_pretrained, such as auto or cuda:0")
    load_in_4bit: bool = _argument(
        "load the base model in 4 bits by bitsandbytes", False
    )
    class_names: list[str] | None = _argument(
        "names of the classes in the order of the model's outputs, where labels are "
        "names that the model's configuration does not know"
    )
    answers: list[str] | None = _argument(
        "answers of a causal language model as they stand behind the texts, such as A "
        "B C D, with a space in front where there is one"
    )
    text_column: str = _argument("column of the texts", "text")
    label_column: str = _argument("column of the labels", "label")
    batch_size: int = _argument("texts in a batch", 8)
    max_length: int | None = _argument("tokens to keep of a text; all by default")


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
class PredictArguments(ModelArguments):
    """Predict texts with a posterior that `calibrate` has saved, as lines of JSON.

    laplace-lora predict --adapter out/ --data new.jsonl --output predictions.jsonl
    """

    data: str = field(metadata={"help": "texts: CSV, JSON lines or a hub name"})
    output: str = field(metadata={"help": "file of JSON lines"})
    posterior: str | None = _argument(
        "folder of the posterior; the adapter's by default"
    )
    amortized: bool = _argument(
        "by one forward pass a text, with variances that are learnt from --train", False
    )
    train: str | None = _argument(
        "training texts, to learn variances from, where none are saved"
    )
    resume: bool = _argument("go on where an interrupted run has stopped", False)


@dataclass(kw_only=True)
class ReportArguments(ModelArguments):
    """Measure a posterior on labelled texts, as one page of HTML.

    laplace-lora report --adapter out/ --data test.jsonl --output report.html
    """

    data: str = field(
        metadata={"help": "texts with labels: CSV, JSON lines or a hub name"}
    )
    output: str = field(metadata={"help": "file of HTML"})
    posterior: str | None = _argument(
        "folder of the posterior; the adapter's by default"
    )
    title: str = _argument("of the page", "Calibration report")
    overwrite: bool = _argument("replace a page that exists", False)


@dataclass(kw_only=True)
class DistillArguments(ModelArguments):
    """Train a student: an ordinary adapter with the posterior's probabilities.

    laplace-lora distill --adapter out/ --train train.jsonl --output student/
    """

    train: str = field(
        metadata={"help": "texts to learn from: CSV, JSON lines or a hub name"}
    )
    output: str = field(metadata={"help": "folder for the student"})
    posterior: str | None = _argument(
        "folder of the posterior; the adapter's by default"
    )
    epochs: float = _argument(
        "passes of the adapter's own training; a student takes three tenths", 3.0
    )
    learning_rate: float = _argument("of the adapter's own training", 1e-4)
    seed: int = _argument("of the training", 0)


@dataclass(kw_only=True)
class DemoArguments:
    """Show in two minutes what a posterior is for, on texts of installed libraries.

    laplace-lora demo
    """

    output: str = _argument("file of HTML with the pictures", "laplace_lora_demo.html")
    seed: int = _argument("of the texts and the training", 0)
