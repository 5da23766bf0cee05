"""The tasks of the Laplace-LoRA paper: data, filters, hyperparameters and distribution shifts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.calibration import paper_prompts
from benchmarks.calibration.hyperparameters import Hyperparameters
from benchmarks.calibration.paper_prompts import LETTERS, ToExample
from benchmarks.calibration.task_data import Row, Source, read_sources
from benchmarks.calibration.text_task import Example, TextTask

CAUSAL_HYPERPARAMETERS = Hyperparameters(
    model="meta-llama/Llama-2-7b-hf",
    target_modules=("q_proj", "v_proj", "lm_head"),
    batch_size=4,
    maximum_length=300,
)
# The paper names no layers of RoBERTa and follows PEFT's defaults, which are these.
ENCODER_HYPERPARAMETERS = Hyperparameters(
    model="FacebookAI/roberta-base",
    target_modules=("query", "value"),
    batch_size=32,
    maximum_length=256,
)


@dataclass(frozen=True)
class PaperTask:
    """One of the paper's tasks.

    Attributes
    ----------
    dataset, configuration : str
        Names on the hub.
    classes : tuple of str
        Names of the classes in the order of the labels.
    is_prompt : bool
        Whether the task is for a causal language model, which answers with a class's name.
    to_example : callable
        Makes an example of a row, or None of a row that the paper leaves out.
    truncation_side : {"left", "right"}
        Side at which a text that is too long is cut. "left" keeps the choices and "Answer:", where
        the answer begins; "right" keeps the question of a prompt that ends with a long passage.
    train_split, test_split : str
        Splits; the paper tests on the public validation split.
    """

    dataset: str
    configuration: str
    classes: tuple[str, ...]
    is_prompt: bool
    to_example: ToExample
    truncation_side: Literal["left", "right"] = "right"
    train_split: str = "train"
    test_split: str = "validation"

    @property
    def hyperparameters(self) -> Hyperparameters:
        """How the paper fine-tunes a model on the task."""
        return CAUSAL_HYPERPARAMETERS if self.is_prompt else ENCODER_HYPERPARAMETERS

    @property
    def train_source(self) -> Source:
        """The training set."""
        return Source(self.dataset, self.configuration, self.train_split)

    @property
    def test_source(self) -> Source:
        """The test set."""
        return Source(self.dataset, self.configuration, self.test_split)


@dataclass(frozen=True)
class PaperShift:
    """Texts of another distribution than OpenBookQA's.

    Attributes
    ----------
    sources : tuple of Source
        Splits that are read one after the other.
    to_example : callable
        Makes an example of a row, or None of a row that the paper leaves out.
    """

    sources: tuple[Source, ...]
    to_example: ToExample


def _winogrande(configuration: str) -> PaperTask:
    return PaperTask(
        "allenai/winogrande", configuration, LETTERS[:2], True, paper_prompts.winogrande, "left"
    )


def _arc(configuration: str) -> PaperTask:
    return PaperTask("allenai/ai2_arc", configuration, LETTERS, True, paper_prompts.arc, "left")


def _glue(
    configuration: str,
    classes: tuple[str, str],
    to_example: ToExample = paper_prompts.sentence_pair,
    dataset: str = "nyu-mll/glue",
) -> PaperTask:
    return PaperTask(dataset, configuration, classes, False, to_example)


SUPER_GLUE = "aps/super_glue"
FALSE_OR_TRUE = ("False", "True")

PAPER_TASKS: dict[str, PaperTask] = {
    "winogrande_s": _winogrande("winogrande_s"),
    "winogrande_m": _winogrande("winogrande_m"),
    "arc_easy": _arc("ARC-Easy"),
    "arc_challenge": _arc("ARC-Challenge"),
    "obqa": PaperTask(
        "allenai/openbookqa", "main", LETTERS, True, paper_prompts.openbookqa, "left"
    ),
    "boolq": PaperTask(SUPER_GLUE, "boolq", FALSE_OR_TRUE, True, paper_prompts.boolq),
    "mrpc": _glue("mrpc", ("not_equivalent", "equivalent")),
    "rte": _glue("rte", ("entailment", "not_entailment")),
    "cola": _glue("cola", ("unacceptable", "acceptable"), paper_prompts.sentence),
    "wic": _glue("wic", FALSE_OR_TRUE, dataset=SUPER_GLUE),
    "wnli": _glue("wnli", ("not_entailment", "entailment")),
    "boolq_pairs": _glue("boolq", FALSE_OR_TRUE, paper_prompts.boolq_pair, SUPER_GLUE),
}

MMLU_SUBJECTS: dict[str, tuple[str, ...]] = {
    "computer_science": (
        "college_computer_science",
        "computer_security",
        "high_school_computer_science",
        "machine_learning",
    ),
    "engineering": ("electrical_engineering",),
    "law": ("international_law", "jurisprudence", "professional_law"),
    "health": (
        "anatomy",
        "clinical_knowledge",
        "college_medicine",
        "human_aging",
        "nutrition",
        "professional_medicine",
        "virology",
    ),
}

SHIFTED_TASK = "obqa"
PAPER_SHIFTS: dict[str, PaperShift] = {
    name: PaperShift((PAPER_TASKS[name].test_source,), PAPER_TASKS[name].to_example)
    for name in ("arc_challenge", "arc_easy")
} | {
    subject: PaperShift(
        tuple(Source("cais/mmlu", task, "test") for task in tasks), paper_prompts.mmlu
    )
    for subject, tasks in MMLU_SUBJECTS.items()
}


def examples_of(rows: Sequence[Row], to_example: ToExample, source: Source) -> list[Example]:
    """Make examples of rows.

    Parameters
    ----------
    rows : sequence of dict
        Rows of one split.
    to_example : callable
        Makes an example of a row, or None of a row to be left out.
    source : Source
        Where the rows come from, for the error message.

    Returns
    -------
    examples : list of Example
        Examples in the order of the rows.
    """
    try:
        examples = [to_example(row) for row in rows]
    except KeyError as error:
        raise ValueError(
            f"A row of {source.dataset} ({source.configuration}), split {source.split}, has no "
            f"field {error}."
        ) from error
    return [example for example in examples if example is not None]


def read_paper_task(name: str, data: Path | None = None, shifted: Sequence[str] = ()) -> TextTask:
    """Read one of the paper's tasks.

    Parameters
    ----------
    name : str
        A key of `PAPER_TASKS`.
    data : Path, optional
        Folder with a file of JSON lines for each split,
        ``<data>/<dataset>/<configuration>/<split>.jsonl`` with the names of the hub, for example
        ``<data>/allenai/winogrande/winogrande_s/train.jsonl``; None reads from the hub.
    shifted : sequence of str
        Keys of `PAPER_SHIFTS`: texts of other distributions, which go with OpenBookQA alone.

    Returns
    -------
    task : TextTask
        Every example that the paper keeps, in the order of the data.

    Raises
    ------
    ValueError
        For an unknown name, for shifted texts of another task than OpenBookQA's, or for rows of
        another schema.
    MissingDataError
        Where data are missing; the message says in one line what to download and where to put it.
    """
    if name not in PAPER_TASKS:
        raise ValueError(f"Unknown task {name!r}; the paper's are {', '.join(PAPER_TASKS)}.")
    unknown = [shift for shift in shifted if shift not in PAPER_SHIFTS]
    if unknown:
        raise ValueError(
            f"Unknown shifted texts {', '.join(unknown)}; the paper's are "
            f"{', '.join(PAPER_SHIFTS)}."
        )
    if shifted and name != SHIFTED_TASK:
        raise ValueError(f"The paper's shifted texts go with the task {SHIFTED_TASK}, not {name}.")

    task = PAPER_TASKS[name]
    shifts = {shift: PAPER_SHIFTS[shift] for shift in shifted}
    schemas = {task.train_source: task.to_example, task.test_source: task.to_example} | {
        source: shift.to_example for shift in shifts.values() for source in shift.sources
    }
    rows = read_sources(list(schemas), data)
    examples = {
        source: examples_of(split, schemas[source], source)
        for source, split in zip(schemas, rows, strict=True)
    }
    return TextTask(
        name=name,
        classes=task.classes,
        is_prompt=task.is_prompt,
        train=examples[task.train_source],
        test=examples[task.test_source],
        shifted={
            subject: [example for source in shift.sources for example in examples[source]]
            for subject, shift in shifts.items()
        },
        truncation_side=task.truncation_side,
    )
