"""Options of the benchmarks' command line; nothing heavy is imported for them."""

import argparse
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "float16", "float64")


def positive(text: str) -> int:
    """Parse an option's value that must be a whole number above zero."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def add_shared_options(parser: argparse.ArgumentParser, files: str, validation: int) -> None:
    """Describe what every benchmark on the docstrings can be told."""
    add_output(parser, files)

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
    add_seed(parser, "data, training and sampling")
    add_machine_options(parser)


def add_cost_options(parser: argparse.ArgumentParser) -> None:
    """Describe what the benchmark of costs can be told."""
    add_output(parser, "cost.json, cost.md and cost.png")
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
        add_number(shapes, option, default, text, nargs="+")
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
        add_number(shapes, option, default, text)
    contest = parser.add_argument_group("contest")
    contest.add_argument(
        "--contestants",
        nargs="+",
        metavar="NAME",
        help="which of bare, lowrank_kron, lowrank_kron_paper, stock_kron, stock_kron_asdl, "
        "stock_diag and bayesian_lora to run; all if not given",
    )
    add_number(
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
    add_seed(parser, "weights and tokens")
    add_machine_options(parser)


def add_table7b_options(parser: argparse.ArgumentParser) -> None:
    """Describe what the paper's table of costs can be told."""
    add_output(parser, "table7b.json and table7b.md")
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
        add_number(shape, option, default, text)
    add_number(shape, "--classes", [2, 4], "answers, one row of the table each", nargs="+")
    shape.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the weights")
    phases = parser.add_argument_group("phases")
    add_number(phases, "--steps", 10, "training steps that are timed")
    add_number(phases, "--batches", 50, "batches of the Laplace fit")
    add_seed(parser, "weights and tokens")
    add_machine_options(parser)


def add_output(parser: argparse.ArgumentParser, files: str) -> None:
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("benchmark_results"),
        metavar="FOLDER",
        help=f"folder for {files}; made if missing",
    )


def add_seed(parser: argparse.ArgumentParser, seeded: str) -> None:
    parser.add_argument("--seed", type=int, default=0, help=f"seed of {seeded}")


def add_seeds(parser: argparse.ArgumentParser, default: list[int], seeded: str) -> None:
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=default,
        metavar="N",
        help=f"seeds {seeded}; a repetition each",
    )


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default=None, help="cpu or cuda; cuda if there is one when not given"
    )
    add_threads_and_quiet(parser)


def add_threads_and_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads",
        type=positive,
        default=None,
        metavar="N",
        help="PyTorch's threads; its own choice if not given",
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def add_number(group: Any, option: str, default: Any, text: str, **options: Any) -> None:
    group.add_argument(option, type=positive, default=default, metavar="N", help=text, **options)


def add_fidelity_options(parser: argparse.ArgumentParser) -> None:
    """Describe what the benchmark of fidelity can be told."""
    add_output(parser, "fidelity.json, fidelity.md and fidelity.png")
    models = parser.add_argument_group("models")
    add_number(models, "--hidden-size", 128, "width of the models, a multiple of 8")
    add_number(models, "--ranks", [4, 10, 32], "ranks of the large factors", nargs="+")
    for option, default, text in (
        ("--base-examples", 2000, "texts of the first training, in full"),
        ("--train-examples", 200, "texts that LoRA weights and posteriors are fitted on"),
        ("--test-examples", 100, "texts whose predictive covariances are compared"),
        ("--epochs", 100, "passes of the LoRA training over its texts"),
    ):
        add_number(models, option, default, text)
    add_seeds(parser, [0, 1], "of texts, weights and training")
    add_threads_and_quiet(parser)


def add_calibration_options(parser: argparse.ArgumentParser) -> None:
    """Describe what the benchmark of calibration can be told."""
    add_output(
        parser,
        "calibration.json, calibration.md, calibration_reliability.png, selective_accuracy.png, "
        "along_training.png and layers.png",
    )
    task = parser.add_argument_group("task")
    task.add_argument(
        "--task",
        default="docstrings",
        metavar="NAME",
        help="docstrings, names (two classes) or choices (a causal language model), made of "
        "installed sources; or one of the paper's: winogrande_s, winogrande_m, arc_easy, "
        "arc_challenge, obqa and boolq for causal language models, mrpc, rte, cola, wic, wnli and "
        "boolq_pairs for encoders",
    )
    for option, text in (
        ("--train-examples", "texts to fine-tune on"),
        ("--test-examples", "texts on which every method is measured"),
        ("--shifted-examples", "texts of each other distribution"),
        ("--files-per-library", "source files of each library that are read, drawn at random"),
    ):
        add_number(task, option, None, f"{text}; the task's own number, or all, if not given")
    task.add_argument(
        "--data",
        type=Path,
        default=None,
        metavar="FOLDER",
        help="JSON lines of the paper's tasks, FOLDER/dataset/configuration/split.jsonl; from the "
        "hub if not given",
    )
    task.add_argument(
        "--shifted",
        nargs="*",
        default=[],
        metavar="NAME",
        help="with the task obqa: arc_challenge, arc_easy, computer_science, engineering, law, "
        "health",
    )
    training = parser.add_argument_group("model and fine-tuning, the task's own if not given")
    training.add_argument(
        "--model", default=None, metavar="NAME", help="of a paper's task: name on the hub or folder"
    )
    training.add_argument("--dtype", choices=DTYPES, default="float32", help="of its weights")
    training.add_argument(
        "--load-in-8bit", action="store_true", help="quantise its weights with bitsandbytes"
    )
    for option, text in (
        ("--steps", "training steps"),
        ("--batch-size", "texts in a training batch, also when a posterior is fitted"),
        ("--maximum-length", "tokens of a text kept"),
        ("--checkpoints", "checkpoints along the training"),
        ("--language-model-steps", "steps in which the task choices trains its language model"),
    ):
        add_number(training, option, None, text)
    training.add_argument("--learning-rate", type=float, default=None, metavar="RATE", help="first")
    training.add_argument(
        "--cache",
        type=Path,
        default=Path("benchmark_cache"),
        metavar="FOLDER",
        help="folder for trained models, which later runs read; made if missing",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=None,
        metavar="NAME",
        help="methods to measure beside MAP, by their names in the table; all if not given. The "
        "deep ensemble alone takes half of the trainings",
    )
    add_number(parser, "--samples", 1000, "samples of the logits for each text with the link mc")
    parser.add_argument(
        "--curves", action="store_true", help="measure at the first seed's checkpoints too"
    )
    add_seeds(parser, [0], "of texts and fine-tuning")
    add_machine_options(parser)
