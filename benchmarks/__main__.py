"""Command line of the benchmarks."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path


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
    return parser


def _add_shared_options(parser: argparse.ArgumentParser, files: str, validation: int) -> None:
    """Describe what every benchmark on the docstrings can be told."""
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("benchmark_results"),
        metavar="FOLDER",
        help=f"folder for {files}; made if missing",
    )

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
    parser.add_argument("--seed", type=int, default=0, help="seed of data, training and sampling")
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


def _compare(arguments: argparse.Namespace) -> None:
    from benchmarks.comparison import compare

    compare(arguments)


def _tune(arguments: argparse.Namespace) -> None:
    from benchmarks.tuning import tune

    tune(arguments)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark that the command line asks for."""
    arguments = build_parser().parse_args(argv)

    # OpenMP's threads spin while they wait for each other. Where other work keeps the processor
    # busy, that makes a run several times slower. OpenMP reads this when PyTorch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

    arguments.run(arguments)


if __name__ == "__main__":
    main()
