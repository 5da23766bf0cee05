"""The light part of `laplace-lora`: its arguments, help and entry point.

It is a package of its own since `import laplace_lora_ext` registers with laplace-torch,
and so imports torch and laplace: help should not wait for them.
"""

from __future__ import annotations

import sys
import warnings
from argparse import Action, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from inspect import cleandoc
from typing import Any

USAGE = 2  # the exit code of whatever the user can mend

TEXT = "text"
LABEL = "label"
"""Columns of texts and labels, where nobody names others."""

_FILE = "CSV, JSON lines or the name of a data set of the hub"


def _argument(text: str, default: Any = None) -> Any:
    """Make a field with a help text."""
    return field(default=default, metadata={"help": text})


def _required(text: str) -> Any:
    return field(metadata={"help": text})


@dataclass(kw_only=True)
class Arguments:
    """What all commands take."""

    debug: bool = _argument("show where in the code an error comes from", False)


@dataclass(kw_only=True)
class TextArguments:
    """How texts and labels are read, which a posterior's file holds too."""

    class_names: list[str] | None = _argument(
        "names of the classes in the order of the model's outputs; those of the base "
        "model's configuration by default"
    )
    answers: list[str] | None = _argument(
        "answers of a causal language model as they stand behind the texts, such as A "
        "B C D, with a space in front where there is one"
    )
    text_column: str | None = _argument(f"column of the texts; {TEXT!r} by default")
    label_column: str | None = _argument(f"column of the labels; {LABEL!r} by default")
    max_length: int | None = _argument(
        "tokens to keep of a text, its last ones where an answer comes behind it; all "
        "by default"
    )


@dataclass(kw_only=True)
class ModelArguments(Arguments, TextArguments):
    """Which adapter, and how it is loaded."""

    adapter: str = _required("folder or hub name of a LoRA adapter")
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

    laplace-lora calibrate --adapter out/ --train train.csv --validation held_out.csv
    """

    train: str = _required(f"texts of the training: {_FILE}")
    validation: str | None = _argument(
        "held-out texts, which choose the prior; without them, agreement chooses it"
    )
    amortize: bool = _argument(
        "learn the variances, for predictions in one forward pass", False
    )
    output: str | None = _argument("folder for the posterior; the adapter's by default")
    overwrite: bool = _argument("replace a posterior that exists", False)


@dataclass(kw_only=True)
class PredictArguments(PosteriorArguments):
    """Predict texts with a posterior that `calibrate` has saved, as lines of JSON.

    laplace-lora predict --adapter out/ --data new.jsonl --output predictions.jsonl
    """

    data: str = _required(f"texts: {_FILE}")
    output: str = _required("file of JSON lines")
    all_columns: bool = _argument("write all columns of a row too", False)
    amortized: bool = _argument(
        "without backward passes, after calibrate --amortize", False
    )
    resume: bool = _argument("go on where an interrupted run has stopped", False)


@dataclass(kw_only=True)
class ReportArguments(PosteriorArguments):
    """Measure a posterior on labelled texts, as one page of HTML.

    laplace-lora report --adapter out/ --data test.jsonl --output report.html
    """

    data: str = _required(f"texts with labels: {_FILE}")
    output: str = _required("file of HTML")
    title: str = _argument("of the page", "Calibration report")
    overwrite: bool = _argument("replace a page that exists", False)


@dataclass(kw_only=True)
class ReviewArguments(PosteriorArguments):
    """Divide texts into those to decide alone and those for a person, as a CSV file.

    laplace-lora review --adapter out/ --data new.jsonl --accuracy 0.95
    """

    data: str = _required(f"texts: {_FILE}")
    accuracy: float | None = _argument("of what is decided alone, such as 0.95")
    capacity: int | None = _argument("in place of --accuracy: texts that people read")
    costs: list[float] | None = _argument(
        "of missing each class, in the order of the names; 1 by default"
    )
    test: str | None = _argument(
        "labelled texts, to prove the accuracy; those that chose the prior by default"
    )
    output: str = _argument("file of CSV", "queue.csv")
    overwrite: bool = _argument("replace a file that exists", False)


@dataclass(kw_only=True)
class DistillArguments(PosteriorArguments):
    """Train a student: an ordinary adapter with the posterior's probabilities.

    laplace-lora distill --adapter out/ --train train.csv --output student/
    """

    train: str = _required(f"texts to learn from: {_FILE}")
    output: str = _required("folder for the student")
    merge: bool = _argument("write a model without an adapter, too", False)
    epochs: float = _argument(
        "passes of the adapter's own training; a student takes three tenths", 3.0
    )
    learning_rate: float = _argument("of the adapter's own training", 1e-4)
    seed: int = _argument("of the training", 0)


@dataclass(kw_only=True)
class DemoArguments(Arguments):
    """Train an adapter on docstrings, and run the other commands on it.

    laplace-lora demo
    """

    output: str = _argument("folder of the files", "laplace_lora_demo")
    seed: int = _argument("of the texts and the training", 0)


COMMANDS = {
    "demo": DemoArguments,
    "calibrate": CalibrateArguments,
    "predict": PredictArguments,
    "report": ReportArguments,
    "review": ReviewArguments,
    "distill": DistillArguments,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that the command line asks for."""
    given = list(sys.argv[1:] if argv is None else argv)
    if not given or given[0] in ("-h", "--help"):
        print(_overview())
        return
    if given == ["--version"]:
        print(version("laplace-lora-ext"))
        return
    name, *rest = given
    if name not in COMMANDS:
        _fail("laplace-lora", f"no command {name!r}: there are {', '.join(COMMANDS)}")
    arguments = _parse(name, rest)
    try:
        with warnings.catch_warnings():
            # Before the imports, which warn too.
            warnings.showwarning = _show_warning
            from laplace_lora_ext.commands import demo, run
            from laplace_lora_ext.commands.loading import be_quiet

            be_quiet()
            getattr(demo if name == "demo" else run, name)(arguments)
    except KeyboardInterrupt:
        if name == "predict":
            print("interrupted: go on with --resume", file=sys.stderr)
        sys.exit(130)
    # Of these kinds is what a user can mend; NotImplementedError is a RuntimeError.
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        if arguments.debug:
            raise
        _fail(f"laplace-lora {name}", str(error))


def _summary_and_example(name: str) -> tuple[str, str]:
    """Take a command's help apart, as its arguments' docstring has it."""
    summary, _, example = cleandoc(COMMANDS[name].__doc__ or "").partition("\n\n")
    return summary, example


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = ["laplace-lora COMMAND [--help]", ""]
    for name in COMMANDS:
        summary, _ = _summary_and_example(name)
        lines.append(f"  {name:<{width}}  {summary}")
    return "\n".join(lines)


def _parse(name: str, given: Sequence[str]) -> Any:
    from transformers import HfArgumentParser

    summary, example = _summary_and_example(name)
    parser = HfArgumentParser(
        COMMANDS[name],  # pyright: ignore[reportArgumentType]
        prog=f"laplace-lora {name}",
        description=summary,
        epilog=f"example:\n  {example}",
        formatter_class=_WithDefaults,
    )
    # Not by the parser's own way into a dataclass, to which an unknown option is a bug.
    return COMMANDS[name](**vars(parser.parse_args(given)))


class _WithDefaults(RawDescriptionHelpFormatter):
    """Writes defaults that are numbers or names behind the help of an option."""

    def _get_help_string(self, action: Action) -> str | None:
        if action.dest == "help" or type(action.default) not in (int, float, str):
            return action.help
        return f"{action.help}; %(default)s by default"


def _show_warning(
    message: Warning | str, category: type[Warning], *_: Any, **__: Any
) -> None:
    """Show a warning as a line, without the place in the code that it comes from."""
    if category is UserWarning:
        print(f"warning: {message}", file=sys.stderr)


def _fail(command: str, message: str) -> None:
    print(f"{command}: error: {message}", file=sys.stderr)
    sys.exit(USAGE)
