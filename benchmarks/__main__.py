"""Command line of the benchmarks."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from inspect import cleandoc
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from benchmarks import options
from benchmarks.options import Run

# The module in `benchmarks.experiments` of the same name, in lower case, runs each.
COMMANDS: tuple[type[Run], ...] = (
    options.Stages,
    options.Calibration,
    options.Few,
    options.Searches,
    options.Cross,
    options.Signs,
    options.Overview,
    options.Evidence,
    options.Cost,
    options.Scale,
    options.Request,
    options.Gpu,
)


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line; help needs no heavy import."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    commands = parser.add_subparsers(
        title="benchmarks", metavar="COMMAND", required=True
    )
    for experiment in COMMANDS:
        summary, _, _ = cleandoc(experiment.__doc__ or "").partition("\n")
        command = commands.add_parser(name_of(experiment), help=summary)
        _describe(command, experiment)
    return parser


def name_of(experiment: type[Run]) -> str:
    """Name the command, the module and the files of an experiment."""
    return experiment.__name__.lower()


def _describe(parser: argparse.ArgumentParser, experiment: type[Run]) -> None:
    """Add the options of an experiment to its command."""
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.description = experiment.__doc__
    parser.set_defaults(experiment=experiment)
    hints = get_type_hints(experiment)
    for field in fields(experiment):
        flag = "--" + field.name.replace("_", "-")
        keywords = _keywords(hints[field.name])
        # What a field says itself counts more than its type: seeds may be 0, for
        # example.
        keywords.update(field.metadata)
        parser.add_argument(flag, default=field.default, **keywords)


def _keywords(hint: Any) -> dict[str, Any]:
    """Tell argparse how to read an option of this type, which may be None."""
    if NoneType in get_args(hint):
        (hint,) = (each for each in get_args(hint) if each is not NoneType)
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) is tuple:  # such as tuple[int, ...]
        element, _ = get_args(hint)
        return {"nargs": "+", **_keywords(element)}
    if hint is int:
        return {"type": positive}
    return {"type": hint}


def positive(text: str) -> int:
    """Read a whole number above zero."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def parse(argv: Sequence[str]) -> Run:
    """Read the options of the experiment that a command line names."""
    arguments = vars(build_parser().parse_args(argv))
    experiment = arguments.pop("experiment")
    return experiment(**arguments)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark that the command line asks for."""
    given = sys.argv[1:] if argv is None else argv
    if not given:
        build_parser().print_help()
        return
    run = parse(given)
    name = name_of(type(run))
    # OpenMP's threads spin while they wait, which makes a run several times slower if
    # other work keeps the processor busy. OpenMP reads this when PyTorch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from benchmarks import measuring, report  # they import PyTorch, which takes seconds

    measuring.set_up(run)
    experiment = import_module(f"benchmarks.experiments.{name}")
    report.publish(experiment.run, run, name)


if __name__ == "__main__":
    main()
