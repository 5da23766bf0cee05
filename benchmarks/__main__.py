"""Command line of the benchmarks."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from inspect import cleandoc

from benchmarks import options

# The module in `benchmarks.experiments` that runs each experiment, and its options.
COMMANDS: dict[str, type[options.Run]] = {
    "tuning": options.Tuning,
    "calibration": options.Calibration,
    "fidelity": options.Fidelity,
    "cost": options.Cost,
    "table7b": options.Table7b,
}


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line; no heavy import is needed to ask for help."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    _describe(parser, "compare", options.Compare)
    commands = parser.add_subparsers(title="other benchmarks", metavar="COMMAND")
    for name, experiment in COMMANDS.items():
        summary = cleandoc(experiment.__doc__ or "").partition("\n")[0]
        _describe(commands.add_parser(name, help=summary), name, experiment)
    return parser


def _describe(parser: argparse.ArgumentParser, name: str, experiment: type[options.Run]) -> None:
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.description = experiment.__doc__
    parser.set_defaults(name=name, experiment=experiment)
    for each in fields(experiment):
        option = f"--{each.name.replace('_', '-')}"
        parser.add_argument(option, default=each.default, **each.metadata)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark that the command line asks for."""
    arguments = vars(build_parser().parse_args(argv))
    name, experiment = arguments.pop("name"), arguments.pop("experiment")
    if name in ("compare", "tuning"):
        # OpenMP's threads spin while they wait for each other. Where other work keeps the processor
        # busy, that makes a run several times slower. OpenMP reads this when PyTorch is imported.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    chosen = experiment(**{each.name: arguments[each.name] for each in fields(experiment)})
    import_module(f"benchmarks.experiments.{name}").run(chosen)


if __name__ == "__main__":
    main()
