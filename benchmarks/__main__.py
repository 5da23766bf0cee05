"""Command line of the benchmarks."""

import argparse
import os
from collections.abc import Sequence
from importlib import import_module
from inspect import cleandoc

from benchmarks.options import (
    Calibration,
    Compare,
    Cost,
    Fidelity,
    Run,
    Table7b,
    Tuning,
    add_options,
    options_of,
)

# The module in `benchmarks.experiments` that runs each experiment, and its options.
COMMANDS: dict[str, type[Run]] = {
    "tuning": Tuning,
    "calibration": Calibration,
    "fidelity": Fidelity,
    "cost": Cost,
    "table7b": Table7b,
}


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line; no heavy import is needed to ask for help."""
    form = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", formatter_class=form, description=_description(Compare)[1]
    )
    add_options(parser, Compare)
    parser.set_defaults(name="compare", experiment=Compare)
    commands = parser.add_subparsers(title="other benchmarks", metavar="COMMAND")
    for name, experiment in COMMANDS.items():
        summary, description = _description(experiment)
        command = commands.add_parser(
            name, formatter_class=form, help=summary, description=description
        )
        add_options(command, experiment)
        command.set_defaults(name=name, experiment=experiment)
    return parser


def _description(experiment: type[Run]) -> tuple[str, str]:
    """First line and the rest of a class's docstring."""
    summary, _, description = cleandoc(experiment.__doc__ or "").partition("\n\n")
    return summary, description


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark that the command line asks for."""
    arguments = build_parser().parse_args(argv)
    if arguments.name in ("compare", "tuning"):
        # OpenMP's threads spin while they wait for each other. Where other work keeps the processor
        # busy, that makes a run several times slower. OpenMP reads this when PyTorch is imported.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    options = options_of(arguments.experiment, arguments)
    import_module(f"benchmarks.experiments.{arguments.name}").run(options)


if __name__ == "__main__":
    main()
