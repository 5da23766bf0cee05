"""Command line of the benchmarks."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from inspect import cleandoc
from typing import Any, get_args, get_origin, get_type_hints

from benchmarks import options

# A module in `benchmarks.experiments` of the same name runs each.
COMMANDS = (
    *(options.Stages, options.Calibration, options.Overview),
    *(options.Text, options.Cost, options.Scale),
)

MAIN_JOB = "stages", "--task", "defaults", "--members", "2", "--smoothing"  # without a command


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line; help needs no heavy import."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    commands = parser.add_subparsers(title="benchmarks", metavar="COMMAND", required=True)
    for experiment in COMMANDS:
        summary = cleandoc(experiment.__doc__ or "").partition("\n")[0]
        _describe(commands.add_parser(experiment.__name__.lower(), help=summary), experiment)
    return parser


def _describe(parser: argparse.ArgumentParser, experiment: type[options.Run]) -> None:
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.description = experiment.__doc__
    parser.set_defaults(experiment=experiment)
    hints = get_type_hints(experiment)
    for each in fields(experiment):
        name, keywords = f"--{each.name.replace('_', '-')}", _keywords(hints[each.name])
        parser.add_argument(name, default=each.default, **{**keywords, **each.metadata})


def _keywords(hint: Any) -> dict[str, Any]:
    """How argparse reads an option of this type, which may be None if it isn't given."""
    (kind,) = (each for each in get_args(hint) or (hint,) if each not in (type(None), ...))
    if kind is bool:
        return {"action": "store_true"}
    if get_origin(kind) or get_origin(hint) is tuple:
        return {"nargs": "+", **_keywords(get_args(kind)[0] if get_args(kind) else kind)}
    return {"type": positive if kind is int else kind}


def positive(text: str) -> int:
    """A whole number above zero."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark that the command line asks for."""
    given = sys.argv[1:] if argv is None else argv
    arguments = vars(build_parser().parse_args(given or MAIN_JOB))
    experiment = arguments.pop("experiment")
    name = experiment.__name__.lower()
    # OpenMP's threads spin while they wait, which makes a run several times slower if other work
    # keeps the processor busy. OpenMP reads this when PyTorch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from benchmarks import measuring, report  # heavy

    chosen = experiment(**{each.name: arguments[each.name] for each in fields(experiment)})
    measuring.set_up(chosen)
    report.publish(import_module(f"benchmarks.experiments.{name}").run, chosen, name)


if __name__ == "__main__":
    main()
