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
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("benchmark_results"),
        metavar="FOLDER",
        help="folder for figures.json, table.md and reliability.png; made if missing",
    )

    data = parser.add_argument_group("data")
    data.add_argument(
        "--train-examples", type=positive, default=300, metavar="N", help="texts to fine-tune on"
    )
    data.add_argument(
        "--validation-examples",
        type=positive,
        default=100,
        metavar="N",
        help="texts on which temperature scaling chooses its temperature",
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
    posterior.add_argument(
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
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark that the command line asks for."""
    arguments = build_parser().parse_args(argv)

    # OpenMP's threads spin while they wait for each other. Where other work keeps the processor
    # busy, that makes a run several times slower. OpenMP reads this when PyTorch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

    from benchmarks.comparison import compare

    compare(arguments)


if __name__ == "__main__":
    main()
