"""Command line of the benchmarks."""

import argparse
import os
from collections.abc import Sequence
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
    parser = argparse.ArgumentParser(**_words("python -m benchmarks", options.Compare))
    _add_options(parser, "compare", options.Compare)
    commands = parser.add_subparsers(title="other benchmarks", metavar="COMMAND")
    for name, experiment in COMMANDS.items():
        words = _words(f"python -m benchmarks {name}", experiment)
        summary = cleandoc(experiment.__doc__ or "").partition("\n")[0]
        _add_options(commands.add_parser(name, help=summary, **words), name, experiment)
    return parser


def _words(program: str, experiment: type[options.Run]) -> dict:
    description = cleandoc(experiment.__doc__ or "").partition("\n\n")[2]
    form = argparse.ArgumentDefaultsHelpFormatter
    return {"prog": program, "formatter_class": form, "description": description}


def _add_options(parser: argparse.ArgumentParser, name: str, experiment: type[options.Run]) -> None:
    options.add_options(parser, experiment)
    parser.set_defaults(name=name, experiment=experiment)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark that the command line asks for."""
    arguments = build_parser().parse_args(argv)
    if arguments.name in ("compare", "tuning"):
        # OpenMP's threads spin while they wait for each other. Where other work keeps the processor
        # busy, that makes a run several times slower. OpenMP reads this when PyTorch is imported.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    chosen = options.options_of(arguments.experiment, arguments)
    import_module(f"benchmarks.experiments.{arguments.name}").run(chosen)


if __name__ == "__main__":
    main()
