"""Options of every experiment; nothing heavy is imported, so that help is quick.

A dataclass for each experiment: its docstring describes it, its fields are the options.
Whole numbers are at least 1 unless a field says otherwise.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "float16", "float64")


def option(default: Any, text: str, **keywords: Any) -> Any:
    """Make a field with a help text, and with what argparse can't read off its type."""
    return field(default=default, metadata={"help": text, **keywords})


@dataclass(frozen=True)
class Run:
    """What every experiment asks."""

    output: Path = option(Path("benchmark_results"), "folder for figures and tables")
    device: str | None = option(None, "cpu or cuda; cuda by default if there is one")
    threads: int | None = option(
        None, "number of PyTorch's threads; PyTorch's choice by default"
    )
    quiet: bool = option(False, "show no progress")
    cache: Path = option(
        Path("benchmark_cache"), "folder of trained models, for later runs"
    )


@dataclass(frozen=True)
class Reading(Run):
    """What every experiment asks that reads texts from installed packages."""

    files_per_library: int | None = option(
        None, "source files to read per library; all by default"
    )


@dataclass(frozen=True)
class TextRun(Reading):
    """What experiments on a task ask; where the default is None, the task chooses."""

    task: str = option(
        "docstrings",
        "docstrings, names, submodules, exceptions, types, belongs, sections, verbs, "
        "comments, defaults or choices (from installed sources; the last is for a "
        "causal language model), or one of the paper's: winogrande_s, winogrande_m, "
        "arc_easy, arc_challenge, obqa, boolq (for causal language models), mrpc, "
        "rte, cola, wic, wnli, boolq_pairs (for encoders); or intents of CLINC150 and "
        "banking77 (--data): travel, banking, work or another domain, clinc150, "
        "banking77; or sentences (--data): trec, emotion, reviews, subjectivity, "
        "offence, stance or scenarios; or ARC and OpenBookQA (--data), answered by "
        "letters or by the "
        "choices' texts: "
        "arc_easy_letters, arc_easy_texts, arc_challenge_letters, "
        "arc_challenge_texts, obqa_letters, obqa_texts",
    )
    train_examples: int | None = option(None, "texts to fine-tune on")
    test_examples: int | None = option(None, "texts to measure every method on")
    shifted_examples: int | None = option(None, "texts from each other distribution")
    data: Path | None = option(
        None,
        "the paper's tasks and intents, as DATA/dataset/configuration/split.jsonl; by "
        "default the paper's tasks come from the hub",
    )
    model: str | None = option(
        None, "model for choices or a paper's task: its name on the hub, or a folder"
    )
    dtype: str = option("float32", "of the model's weights", choices=DTYPES)
    batch_size: int | None = option(None, "texts in a batch, for training and fitting")
    maximum_length: int | None = option(None, "tokens to keep of a text")
    learning_rate: float | None = option(None, "at the start, or after warming up")


@dataclass(frozen=True)
class SeveralSeeds(TextRun):
    """What every experiment asks that fine-tunes with several seeds."""

    steps: int | None = option(None, "training steps; the task's own number by default")
    checkpoints: int | None = option(
        None, "checkpoints to keep; the task's own number by default"
    )
    # Unlike other numbers a seed may be 0.
    seeds: tuple[int, ...] = option((0,), "seeds of texts and fine-tuning", type=int)


@dataclass(frozen=True)
class Calibration(SeveralSeeds):
    """Methods without held-out texts on one task: minutes to hours per seed."""

    methods: tuple[str, ...] | None = option(
        None,
        "methods to measure beside MAP, by key or by name in the table; all by default",
    )


@dataclass(frozen=True)
class Stages(SeveralSeeds):
    """Training in stages and mixtures, beside ensembles and temperatures."""

    members: int = option(3, "adapters to train in stages, for mixtures and ensembles")
    smoothing: tuple[float, ...] = option(
        (0.1, 0.2, 0.35, 0.5),
        "shares of label smoothing to try, beside none",
        nargs="*",  # without a number none is tried
    )
    no_ordinary: bool = option(
        False,
        "leave out the ordinary and the second training, and rivals: half the time",
    )
    no_students: bool = option(False, "leave out students and learnt variances")
    rivals: tuple[str, ...] = option(
        (),
        "methods of `calibration` to measure on the ordinary training, too",
        nargs="*",
    )
    posteriors: tuple[str, ...] = option(
        (),
        "posteriors of the list to measure in stages, too: held-out texts choose for "
        "them as for ours",
        nargs="*",
    )


@dataclass(frozen=True)
class Few(SeveralSeeds):
    """What do few held-out texts choose? Draws of them, around one training."""

    # A class may have the number 0.
    classes: tuple[int, ...] = option((), "numbers of the classes to keep", type=int)
    held: tuple[int, ...] = option((4, 8, 20), "texts to hold out of each class")
    draws: int = option(40, "draws of the texts that are held out")


@dataclass(frozen=True)
class Searches(SeveralSeeds):
    """Which numbers of the search are best? First stages choose, second ones judge."""

    tasks: tuple[str, ...] = option(
        (
            *("docstrings", "names", "exceptions", "types", "belongs"),
            *("trec", "emotion"),
        ),
        "tasks by which settings are chosen, in place of one; two of them need --data",
    )
    classes: tuple[int, ...] = option((), "numbers of the classes to keep", type=int)
    texts: int = option(20, "texts of each class that the first stage learns")
    held: int = option(5, "that choose, of each class, and that the second adds")
    draws: int = option(20, "draws of the texts that choose")


@dataclass(frozen=True)
class Cross(SeveralSeeds):
    """Is it the curvature or the prior? Both crossed, around one checkpoint."""

    grid_size: int = option(
        13, "prior precisions between 0.01 and 10,000 that labels choose from"
    )


@dataclass(frozen=True)
class Signs(SeveralSeeds):
    """How many passes does a fit need, by labels or signs? Intents (--data)."""

    task: str = option(
        "banking77", "banking77, clinc150, or another of the tasks of `stages`"
    )
    passes: tuple[int, ...] = option(
        (1, 2, 4, 8, 16), "backward passes, each with a draw for every text"
    )
    draws: int = option(2, "fits by each, with other draws")


@dataclass(frozen=True)
class Overview(Run):
    """Every method over several tasks, by runs of calibration and stages."""

    runs: tuple[Path, ...] = option((), "folders written by `calibration` and `stages`")
    ours: str = option(
        "In stages, held-out texts, mean_field",
        "method to compare with all others, run by run",
    )


@dataclass(frozen=True)
class Evidence(Run):
    """What a posterior is worth beside a temperature, by runs of stages."""

    runs: tuple[Path, ...] = option((), "folders written by `stages`")


@dataclass(frozen=True)
class Cost(Run):
    """Time and memory to fit and predict, by the width of random Llamas: 20 minutes."""

    hidden_sizes: tuple[int, ...] = option(
        (256, 512, 1024, 2048, 4096), "widths of the models"
    )
    layers: tuple[int, ...] = option(
        (4, 4, 2, 2, 1), "of each model, or one number for all"
    )
    batches: tuple[int, ...] = option(
        (8, 4, 4, 2, 1), "in each model's fit, or one number for all"
    )
    prediction_batch_sizes: tuple[int, ...] = option(
        (1, 8, 32),
        "texts to predict at once; on a CPU 8 at most for models wider than 1024",
    )
    dtypes: tuple[str, ...] = option(
        ("float32", "bfloat16"),
        "on a CPU all but the first for the smallest model only",
        choices=DTYPES,
    )
    batch_size: int = option(4, "texts in a batch of a fit")
    length: int = option(32, "tokens of a text")
    classes: int = option(4, "answers")
    rank: int = option(8, "r of the LoRA layers")
    contestants: tuple[str, ...] | None = option(
        None, "methods to run, by key or by name in the table; all by default"
    )
    repetitions: int = option(5, "calls to time; fewer if one takes very long")
    limit: float = option(40.0, "seconds after which to stop a contestant")
    seed: int = option(0, "of weights and tokens", type=int)


@dataclass(frozen=True)
class Scale(Run):
    """Time and memory by the number of classes, tokens and processes: ten minutes."""

    classes: tuple[int, ...] = option(
        (2, 5, 12, 77, 150), "answers; none to omit", nargs="*"
    )
    lengths: tuple[int, ...] = option(
        (128, 512, 2048),
        "tokens of a text, without and with checkpointing; none to omit",
        nargs="*",
    )
    processes: tuple[int, ...] = option(
        (1, 2, 4), "that share a fit; none to omit", nargs="*"
    )
    widths: tuple[int, ...] = option(
        (256, 1024),
        "of classifiers, for what a head adds to a fit; none to omit",
        nargs="*",
    )
    hidden_size: int = option(256, "width of the model, a multiple of 8")
    layers: int = option(4, "of the model")
    dtype: str = option("float32", "of the model's weights", choices=DTYPES)
    batch_size: int = option(4, "texts in a batch")
    batches: int = option(2, "in a fit")
    repetitions: int = option(3, "calls to time")
    limit: float = option(300.0, "seconds after which to stop a measurement")
    seed: int = option(0, "of weights and tokens", type=int)


@dataclass(frozen=True)
class Request(Run):
    """What one text costs, in forward passes of the model: five minutes."""

    classes: tuple[int, ...] = option((3, 45), "of the encoder")
    length: int = option(16, "tokens of a text")
    texts: int = option(64, "random ones that it is fitted to")
    requests: int = option(200, "of each kind")
    workers: int = option(8, "threads that ask at the same time, for the throughput")
    seed: int = option(0, "of weights and tokens", type=int)


@dataclass(frozen=True)
class Gpu(Run):
    """What large models cost on one card, in the minutes that there are."""

    minutes: float = option(10.0, "after which nothing more is begun")
    models: tuple[str, ...] = option(
        ("llama", "qwen"),
        "shapes of Llama 3 8B and Qwen 2.5 1.5B, in this order",
        choices=("llama", "qwen"),
    )
    tiny: bool = option(False, "a tiny model instead, to try the command")
    lengths: tuple[int, ...] = option((512, 2048), "tokens of a text, two numbers")
    examples: int = option(4, "texts in a batch")
    batches: int = option(2, "in a fit")
    dtype: str = option("bfloat16", "of the models' weights", choices=DTYPES)
