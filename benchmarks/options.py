"""Options of every experiment; nothing heavy is imported, so that help is quick.

A dataclass for each experiment: its docstring describes it, its fields are the options.
"""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "float16", "float64")
RESULTS, CACHE = Path("benchmark_results"), Path("benchmark_cache")
MANY: dict[str, Any] = {"nargs": "+"}
OTHER_ROWS = "of all rows but the README's example"
STOCK = ("stock_kron", "stock_kron_asdl", "stock_diag")
CONTESTANTS = ("bare", "lowrank_kron", "lowrank_kron_paper", *STOCK, "bayesian_lora")


def positive(text: str) -> int:
    """Parse an option's value that must be a whole number above zero."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def option(default: Any, text: str, **keywords: Any) -> Any:
    return field(default=default, metadata={"help": text, **keywords})


def number(default: Any, text: str, **keywords: Any) -> Any:
    return option(default, text, **{"type": positive, "metavar": "N", **keywords})


def flag(text: str) -> Any:
    return option(False, text, action="store_true")


@dataclass(frozen=True)
class Run:
    output: Path = option(RESULTS, "folder for what the run writes", type=Path)
    device: str | None = option(None, "cpu or cuda; cuda if there is one when not given")
    threads: int | None = number(None, "PyTorch's threads; its own choice if not given")
    quiet: bool = flag("show no progress")
    cache: Path = option(CACHE, "folder of trained models for later runs", type=Path)


@dataclass(frozen=True)
class TextRun(Run):  # what is not given is the task's own choice
    task: str = option(
        "docstrings",
        "docstrings, names, submodules, exceptions, types, belongs, sections, verbs, comments, "
        "defaults or choices (of installed sources; the last for a causal language model), or one "
        "of the paper's: winogrande_s, "
        "winogrande_m, arc_easy, arc_challenge, obqa, boolq (for causal language models), mrpc, "
        "rte, cola, wic, wnli, boolq_pairs (for encoders)",
    )
    train_examples: int | None = number(None, "texts to fine-tune on")
    test_examples: int | None = number(None, "texts on which every method is measured")
    shifted_examples: int | None = number(None, "texts of each other distribution")
    files_per_library: int | None = number(None, "source files read of each library; or all")
    data: Path | None = option(
        None, "the paper's tasks, DATA/dataset/configuration/split.jsonl; or the hub", type=Path
    )
    shifted: tuple[str, ...] = option(
        (), "of obqa: arc_challenge arc_easy computer_science engineering law health", nargs="*"
    )
    model: str | None = option(None, "of a paper's task: name on the hub or folder")
    dtype: str = option("float32", "of its weights", choices=DTYPES)
    load_in_8bit: bool = flag("quantise its weights with bitsandbytes")
    batch_size: int | None = number(None, "texts in a batch of training, and of a posterior's fit")
    maximum_length: int | None = number(None, "tokens of a text kept")
    learning_rate: float | None = option(None, "the first, or after a warm-up", type=float)
    language_model_steps: int | None = number(None, "of the task choices' own language model")


@dataclass(frozen=True)
class OneModel(TextRun):
    train_examples: int | None = number(300, "texts to fine-tune on")
    epochs: int = number(20, "passes over the training texts")
    seed: int = option(0, "seed of data, training and sampling", type=int)
    samples: int = number(10000, "samples of the logits for each text with the link mc")


@dataclass(frozen=True)
class Compare(OneModel):
    """The README's example beside what it is compared with, in five minutes on two idle cores.

    Writes figures.json, table.md and reliability.png.
    """

    validation_examples: int = number(100, "texts on which a temperature is chosen")
    test_examples: int | None = number(200, "texts on which every method is measured")
    shifted_examples: int | None = number(100, "texts of another distribution")
    prior_structure: str = option("layerwise", OTHER_ROWS, choices=("scalar", "layerwise"))
    link: str = option("probit", OTHER_ROWS, choices=("mc", "probit"))
    every_row: bool = flag("also lowrank_kron by the evidence, and with the paper's scalar and mc")


@dataclass(frozen=True)
class Tuning(OneModel):
    """What choosing a prior precision costs and is worth, in a quarter of an hour.

    Writes tuning.json, tuning.md, tuning.png and variance_by_layer.png.
    """

    validation_examples: int = number(200, "texts on which a prior precision is chosen")
    test_examples: int | None = number(1000, "texts on which every choice is measured")
    grid_size: int = number(100, "points of the grid")
    stock_grid_size: int = number(4, "points of the stock class's grid, each of the same cost")
    steps: int = number(1000, "steps of val_gd")


@dataclass(frozen=True)
class Calibration(TextRun):
    """Calibration of every method of the paper on its tasks or embedded ones; an hour a seed.

    Writes calibration.json, .md and _reliability.png, selective_accuracy.png, layers.png, and
    along_training.png.
    """

    steps: int | None = number(None, "training steps; the task's own number if not given")
    checkpoints: int | None = number(None, "checkpoints along the training, likewise")
    methods: tuple[str, ...] | None = option(
        None, "to measure beside MAP, by their keys or names in the table; all if not given", **MANY
    )
    samples: int = number(1000, "samples of the logits for each text with the link mc")
    curves: bool = flag("measure at the first seed's checkpoints too")
    seeds: tuple[int, ...] = number((0,), "seeds of texts and fine-tuning", type=int, **MANY)


@dataclass(frozen=True)
class Text(Run):
    """Free text by a pretrained language model: calibrated tokens, wrong answers; half an hour.

    Writes text.json and text.md. Needs the extra llm.
    """

    task: str = option("functions", "what is to be named", choices=("functions", "parameters"))
    train_examples: int = number(120, "texts to fine-tune on")
    validation_examples: int = number(16, "texts that choose a temperature and a prior precision")
    test_examples: int = number(40, "texts on which every method is measured")
    written_examples: int = number(8, "texts that are written under the posterior predictive")
    files_per_library: int | None = number(None, "source files read of each library; or all")
    epochs: int = number(6, "passes over the training texts")
    learning_rate: float = option(1e-3, "after a warm-up", type=float)
    batch_size: int = number(8, "texts in a batch")
    rank: int = number(8, "r of the LoRA layers, in query and value")
    draws: int = number(4, "of the posterior, and of every rival")
    grid_size: int = number(9, "prior precisions that validation texts choose from")
    model: str | None = option(None, "folder of another model than Gemma 3 270M")
    seed: int = option(0, "seed of texts, training and draws", type=int)


@dataclass(frozen=True)
class Overview(Run):
    """Calibration of every method over several tasks, from runs of calibration; seconds.

    Writes overview.json, overview.md and overview.png.
    """

    runs: tuple[Path, ...] = option((), "folders that `calibration` has written", type=Path, **MANY)


@dataclass(frozen=True)
class Fidelity(Run):
    """Error of each curvature against the exact one, and the memory it keeps; twelve minutes.

    Writes fidelity.json, fidelity.md and fidelity.png.
    """

    hidden_size: int = number(128, "width of the models, a multiple of 8")
    ranks: tuple[int, ...] = number((4, 10, 32), "ranks of the large factors", **MANY)
    base_examples: int = number(2000, "texts of the first training, in full")
    train_examples: int = number(200, "texts that LoRA weights and posteriors are fitted on")
    test_examples: int = number(100, "texts whose predictive covariances are compared")
    epochs: int = number(100, "passes of the LoRA training over its texts")
    files_per_library: int = number(200, "source files of each library that are read")
    seeds: tuple[int, ...] = number((0, 1), "of texts, weights and training", type=int, **MANY)


@dataclass(frozen=True)
class Cost(Run):
    """Time and memory of fits and predictions of random Llamas, by their width; 20 minutes.

    Writes cost.json, cost.md and cost.png.
    """

    hidden_sizes: tuple[int, ...] = number((256, 512, 1024, 2048, 4096), "of the models", **MANY)
    layers: tuple[int, ...] = number((4, 4, 2, 2, 1), "of each, or one number for all", **MANY)
    batches: tuple[int, ...] = number((8, 4, 4, 2, 1), "of a fit, likewise", **MANY)
    prediction_batch_sizes: tuple[int, ...] = number(
        (1, 8, 32), "of predictions; on a CPU, 8 at most of models wider than 1024", **MANY
    )
    growth_widths: tuple[int, ...] = number((512, 1024, 2048, 4096, 8192), "of blocks", **MANY)
    dtypes: tuple[str, ...] = option(
        DTYPES[:2], "on a CPU, all but the first for the smallest model", choices=DTYPES, **MANY
    )
    batch_size: int = number(4, "texts in a batch of a fit")
    length: int = number(32, "tokens of a text")
    classes: int = number(4, "answers")
    rank: int = number(8, "r of the LoRA layers")
    contestants: tuple[str, ...] = option(
        CONTESTANTS, "methods to run, by their keys", choices=CONTESTANTS, **MANY
    )
    repetitions: int = number(5, "calls that are timed, fewer of one that takes very long")
    limit: float = option(40.0, "seconds after which a contestant is ended", type=float)
    memory_limit: float | None = option(None, "MB to add at most; or all free", type=float)
    seed: int = option(0, "seed of weights and tokens", type=int)


@dataclass(frozen=True)
class Scale(Run):
    """Time and memory against examples, classes, length and processes; ten minutes.

    Writes scale.json, scale.md and scale.png.
    """

    examples: tuple[int, ...] = number((500, 2000, 8000), "of the linearised methods", **MANY)
    classes: tuple[int, ...] = number((4, 20, 77), "answers", **MANY)
    lengths: tuple[int, ...] = number((128, 512, 2048), "tokens of a text", **MANY)
    processes: tuple[int, ...] = number((1, 2, 4), "that share a fit", **MANY)
    features: int = number(1024, "of an example in the linearised methods")
    hidden_size: int = number(256, "width of the model, a multiple of 8")
    layers: int = number(2, "of the model")
    batch_size: int = number(4, "texts in a batch")
    batches: int = number(2, "of a fit")
    repetitions: int = number(3, "calls that are timed")
    limit: float = option(300.0, "seconds after which a measurement is ended", type=float)
    seed: int = option(0, "seed of weights and tokens", type=int)


@dataclass(frozen=True)
class Table7b(Run):
    """The paper's table of costs, in the shape of Llama-2-7B; a small shape runs on a CPU.

    Writes table7b.json and table7b.md.
    """

    hidden_size: int = number(4096, "hidden size")
    layers: int = number(32, "layers")
    heads: int = number(32, "attention heads")
    intermediate_size: int = number(11008, "width within the feed-forward layers")
    vocabulary: int = number(32000, "tokens known")
    rank: int = number(8, "r of the LoRA layers")
    batch_size: int = number(4, "texts in a batch")
    length: int = number(300, "tokens of a text")
    classes: tuple[int, ...] = number((2, 4), "answers, one row of the table each", **MANY)
    dtype: str = option("bfloat16", "of the weights", choices=DTYPES)
    steps: int = number(10, "training steps that are timed")
    batches: int = number(50, "batches of the Laplace fit")
    seed: int = option(0, "seed of weights and tokens", type=int)
