"""Command line of the benchmarks."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "float16", "float64")


def positive(text: str) -> int:
    """Parse an option's value that must be a whole number above zero."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line; no heavy import is needed to ask for help."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Fine-tune a small pretrained encoder with LoRA on real text from installed "
        "sources (which library does a docstring document?), and compare the calibration and cost "
        "of Laplace-LoRA, stock laplace-torch, temperature scaling and the bare model. Every "
        "figure is measured in the run; nothing is downloaded. With its defaults a run takes up "
        "to ten minutes on two processor cores.",
    )
    _add_shared_options(parser, "figures.json, table.md and reliability.png", validation=100)
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
        "choices are worth. With its defaults a run takes about five minutes on two processor "
        "cores.",
    )
    _add_shared_options(
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

    cost = commands.add_parser(
        "cost",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        help="time and memory of fits and predictions against the model's width",
        description="Fit and predict on random weights in the shape of Llama, with this library, "
        "with the stock classes, with the package bayesian-lora if it is installed, and with the "
        "model's passes alone; each in a process of its own. The weights stand for shapes and "
        "speed only. With its defaults a run takes up to 15 minutes on two processor cores.",
    )
    _add_cost_options(cost)
    cost.set_defaults(run=_cost)

    table7b = commands.add_parser(
        "table7b",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        help="the paper's table of costs, on random weights in the shape of Llama-2-7B; on a GPU",
        description="Time training steps of LoRA and a Laplace fit after them, and measure the "
        "peak memory of both, on random weights in the shape of Llama-2-7B. Needs a GPU that "
        "holds 13 GB of weights and a batch's activations; a small shape runs on a CPU.",
    )
    _add_table7b_options(table7b)
    table7b.set_defaults(run=_table7b)
    return parser


def _add_shared_options(parser: argparse.ArgumentParser, files: str, validation: int) -> None:
    """Describe what every benchmark on the docstrings can be told."""
    _add_output(parser, files)

    data = parser.add_argument_group("data")
    data.add_argument(
        "--train-examples", type=positive, default=300, metavar="N", help="texts to fine-tune on"
    )
    data.add_argument(
        "--validation-examples",
        type=positive,
        default=validation,
        metavar="N",
        help="texts on which a temperature or a prior precision is chosen",
    )
    data.add_argument(
        "--test-examples",
        type=positive,
        default=1000,
        metavar="N",
        help="texts on which every method is measured",
    )
    data.add_argument(
        "--shifted-examples",
        type=positive,
        default=300,
        metavar="N",
        help="texts of a library that is not among the classes",
    )
    data.add_argument(
        "--files-per-library",
        type=positive,
        default=None,
        metavar="N",
        help="read at most so many source files of each library, drawn at random; all if not given",
    )
    data.add_argument(
        "--maximum-length", type=positive, default=32, metavar="N", help="tokens of a text kept"
    )

    training = parser.add_argument_group("fine-tuning")
    training.add_argument(
        "--epochs", type=positive, default=20, metavar="N", help="passes over the training texts"
    )
    training.add_argument(
        "--learning-rate",
        type=float,
        default=2e-3,
        metavar="RATE",
        help="AdamW's learning rate after the warm-up, from which it falls linearly to zero",
    )
    training.add_argument(
        "--batch-size",
        type=positive,
        default=16,
        metavar="N",
        help="texts in a training batch, also when a posterior is fitted",
    )

    parser.add_argument(
        "--samples",
        type=positive,
        default=10000,
        metavar="N",
        help="samples of the logits for each text with the link mc",
    )
    _add_machine_options(parser, "data, training and sampling")


def _add_cost_options(parser: argparse.ArgumentParser) -> None:
    """Describe what the benchmark of costs can be told."""
    _add_output(parser, "cost.json, cost.md and cost.png")
    shapes = parser.add_argument_group("shapes")
    for option, default, text in (
        ("--hidden-sizes", [256, 512, 1024, 2048, 4096], "hidden sizes of the models"),
        ("--layers", [4, 4, 2, 2, 1], "layers of each of them, or one number for all"),
        ("--batches", [8, 4, 4, 2, 1], "batches of a fit, likewise"),
        (
            "--prediction-batch-sizes",
            [1, 8, 32],
            "texts in a batch of a prediction; on a CPU, none above 8 for models wider than 1024",
        ),
        ("--growth-widths", [512, 1024, 2048, 4096, 8192], "widths of single blocks"),
    ):
        _add_number(shapes, option, default, text, nargs="+")
    shapes.add_argument(
        "--dtypes",
        nargs="+",
        choices=DTYPES,
        default=["float32", "bfloat16"],
        help="of the weights; on a CPU, all but the first for the smallest model alone",
    )
    for option, default, text in (
        ("--batch-size", 4, "texts in a batch of a fit"),
        ("--length", 32, "tokens of a text"),
        ("--classes", 4, "answers"),
        ("--rank", 8, "r of the LoRA layers"),
    ):
        _add_number(shapes, option, default, text)
    contest = parser.add_argument_group("contest")
    contest.add_argument(
        "--contestants",
        nargs="+",
        metavar="NAME",
        help="which of bare, lowrank_kron, lowrank_kron_paper, stock_kron, stock_kron_asdl, "
        "stock_diag and bayesian_lora to run; all if not given",
    )
    _add_number(
        contest, "--repetitions", 5, "calls that are timed, fewer of one that takes very long"
    )
    contest.add_argument(
        "--limit",
        type=float,
        default=40.0,
        metavar="SECONDS",
        help="time after which a contestant is ended, with a line that says so",
    )
    contest.add_argument(
        "--memory-limit",
        type=float,
        default=None,
        metavar="MB",
        help="do not run what would need more; what is free if not given",
    )
    _add_machine_options(parser, "weights and tokens")


def _add_table7b_options(parser: argparse.ArgumentParser) -> None:
    """Describe what the paper's table of costs can be told."""
    _add_output(parser, "table7b.json and table7b.md")
    shape = parser.add_argument_group("shape")
    for option, default, text in (
        ("--hidden-size", 4096, "hidden size"),
        ("--layers", 32, "layers"),
        ("--heads", 32, "attention heads"),
        ("--intermediate-size", 11008, "width within the feed-forward layers"),
        ("--vocabulary", 32000, "tokens known"),
        ("--rank", 8, "r of the LoRA layers"),
        ("--batch-size", 4, "texts in a batch"),
        ("--length", 300, "tokens of a text"),
    ):
        _add_number(shape, option, default, text)
    _add_number(shape, "--classes", [2, 4], "answers, one row of the table each", nargs="+")
    shape.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the weights")
    phases = parser.add_argument_group("phases")
    _add_number(phases, "--steps", 10, "training steps that are timed")
    _add_number(phases, "--batches", 50, "batches of the Laplace fit")
    _add_machine_options(parser, "weights and tokens")


def _add_output(parser: argparse.ArgumentParser, files: str) -> None:
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("benchmark_results"),
        metavar="FOLDER",
        help=f"folder for {files}; made if missing",
    )


def _add_machine_options(parser: argparse.ArgumentParser, seeded: str) -> None:
    parser.add_argument("--seed", type=int, default=0, help=f"seed of {seeded}")
    parser.add_argument(
        "--device", default=None, help="cpu or cuda; cuda if there is one when not given"
    )
    parser.add_argument(
        "--threads",
        type=positive,
        default=None,
        metavar="N",
        help="PyTorch's threads; its own choice if not given",
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def _add_number(group: Any, option: str, default: Any, text: str, **options: Any) -> None:
    group.add_argument(option, type=positive, default=default, metavar="N", help=text, **options)


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
