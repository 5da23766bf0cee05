"""Command line of the benchmarks."""

import argparse
import os
from collections.abc import Sequence

from benchmarks.options import (
    add_calibration_options,
    add_cost_options,
    add_fidelity_options,
    add_shared_options,
    add_table7b_options,
    positive,
)


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line; no heavy import is needed to ask for help."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Fine-tune a small pretrained encoder with LoRA on real text from installed "
        "sources (which library does a docstring document?), and compare the calibration and cost "
        "of Laplace-LoRA, stock laplace-torch, temperature scaling and the bare model. Every "
        "figure is measured in the run; nothing is downloaded. With its defaults a run takes up "
        "to a quarter of an hour on two processor cores.",
    )
    add_shared_options(parser, "figures.json, table.md and reliability.png", validation=100)
    posterior = parser.add_argument_group("posteriors")
    posterior.add_argument(
        "--prior-structure",
        choices=("scalar", "layerwise"),
        default="layerwise",
        help="prior precision that the evidence sets; this library's rows are repeated with the "
        "paper's, a scalar",
    )
    posterior.add_argument(
        "--link",
        choices=("mc", "probit"),
        default="probit",
        help="from Gaussian logits to probabilities; this library's rows are repeated with the "
        "paper's, mc",
    )
    parser.set_defaults(run=_compare)

    commands = parser.add_subparsers(title="other benchmarks", metavar="COMMAND")
    tuning = commands.add_parser(
        "tuning",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        help="what choosing a prior precision costs and is worth",
        description="Time every way of choosing a prior precision beside one prediction pass over "
        "the validation texts and beside the stock class, and measure on the test texts what the "
        "choices are worth. With its defaults a run takes up to a quarter of an hour on two "
        "processor cores.",
    )
    add_shared_options(
        tuning, "tuning.json, tuning.md, tuning.png and variance_by_layer.png", validation=200
    )
    search = tuning.add_argument_group("searches")
    search.add_argument(
        "--grid-size", type=positive, default=100, metavar="N", help="points of the grid"
    )
    search.add_argument(
        "--stock-grid-size",
        type=positive,
        default=4,
        metavar="N",
        help="points of the stock class's grid, each of which costs it as much as any other",
    )
    search.add_argument("--steps", type=positive, default=1000, metavar="N", help="steps of val_gd")
    tuning.set_defaults(run=_tune)

    calibration = commands.add_parser(
        "calibration",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        help="calibration of every method of the paper, on its tasks or on embedded ones",
        description="Fine-tune a model with LoRA, and compare the bare model, MC dropout, "
        "ensembles, temperature scaling and Laplace approximations over some or all LoRA weights, "
        "with prior precisions by the evidence of the training set and by validation data, under "
        "every link approximation. A seed of the task docstrings takes up to an hour on one busy "
        "processor core.",
    )
    add_calibration_options(calibration)
    calibration.set_defaults(run=_calibrate)

    fidelity = commands.add_parser(
        "fidelity",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        help="error of each curvature against the exact one, and the memory that it keeps",
        description="Train small models on real text, compute the exact generalised Gauss-Newton "
        "matrix of their LoRA weights in float64, and measure how close each curvature comes to "
        "it, at the exact evidence's prior precision. With its defaults a run takes twelve "
        "minutes on one busy processor core.",
    )
    add_fidelity_options(fidelity)
    fidelity.set_defaults(run=_fidelity)

    cost = commands.add_parser(
        "cost",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        help="time and memory of fits and predictions against the model's width",
        description="Fit and predict on random weights in the shape of Llama, with this library, "
        "with the stock classes, with the package bayesian-lora if it is installed, and with the "
        "model's passes alone; each in a process of its own. The weights stand for shapes and "
        "speed only. With its defaults a run takes up to 15 minutes on two processor cores.",
    )
    add_cost_options(cost)
    cost.set_defaults(run=_cost)

    table7b = commands.add_parser(
        "table7b",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        help="the paper's table of costs, on random weights in the shape of Llama-2-7B; on a GPU",
        description="Time training steps of LoRA and a Laplace fit after them, and measure the "
        "peak memory of both, on random weights in the shape of Llama-2-7B. Needs a GPU that "
        "holds 13 GB of weights and a batch's activations; a small shape runs on a CPU.",
    )
    add_table7b_options(table7b)
    table7b.set_defaults(run=_table7b)
    return parser


def _wait_passively() -> None:
    # OpenMP's threads spin while they wait for each other. Where other work keeps the processor
    # busy, that makes a run several times slower. OpenMP reads this when PyTorch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _compare(arguments: argparse.Namespace) -> None:
    _wait_passively()
    from benchmarks.comparison import compare

    compare(arguments)


def _tune(arguments: argparse.Namespace) -> None:
    _wait_passively()
    from benchmarks.tuning import tune

    tune(arguments)


def _calibrate(arguments: argparse.Namespace) -> None:
    from benchmarks.calibration.run import calibrate
    from benchmarks.calibration.task_data import MissingDataError

    try:
        calibrate(arguments)
    except MissingDataError as error:
        raise SystemExit(str(error)) from None


def _fidelity(arguments: argparse.Namespace) -> None:
    from benchmarks.fidelity import fidelity

    fidelity(arguments)


def _cost(arguments: argparse.Namespace) -> None:
    from benchmarks.cost import cost

    cost(arguments)


def _table7b(arguments: argparse.Namespace) -> None:
    from benchmarks.table7b import table7b

    table7b(arguments)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark that the command line asks for."""
    arguments = build_parser().parse_args(argv)

    arguments.run(arguments)


if __name__ == "__main__":
    main()
