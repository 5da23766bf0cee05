"""The tasks of the Laplace-LoRA paper: data, filters, hyperparameters and distribution shifts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks.options import TextOptions
from benchmarks.tasks import paper_prompts
from benchmarks.tasks.paper_prompts import LETTERS, ToExample
from benchmarks.tasks.rows import Row, Source, read_sources
from benchmarks.tasks.task import Example, Task, TaskSource
from benchmarks.training import Hyperparameters

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
SUPER_GLUE = "aps/super_glue"
FALSE_OR_TRUE = ("False", "True")


@dataclass(frozen=True)
class PaperTask:
    """One of the paper's tasks, by its names on the hub.

    The truncation side "left" keeps the choices and "Answer:", where the answer begins; "right"
    keeps the question of a prompt that ends with a long passage.
    """

    dataset: str
    configuration: str
    classes: tuple[str, ...]
    is_prompt: bool
    to_example: ToExample
    truncation_side: Literal["left", "right"] = "right"

    @property
    def hyperparameters(self) -> Hyperparameters:
        return CAUSAL_HYPERPARAMETERS if self.is_prompt else ENCODER_HYPERPARAMETERS

    @property
    def train_source(self) -> Source:
        return Source(self.dataset, self.configuration, "train")

    @property
    def test_source(self) -> Source:
        """The paper tests on the public validation split."""
        return Source(self.dataset, self.configuration, "validation")


@dataclass(frozen=True)
class PaperShift:
    """Texts of another distribution than OpenBookQA's, from splits read one after the other."""

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
    """Make examples of the rows that the paper keeps."""
    try:
        examples = [to_example(row) for row in rows]
    except KeyError as error:
        raise ValueError(
            f"A row of {source.dataset} ({source.configuration}), split {source.split}, has no "
            f"field {error}."
        ) from error
    return [example for example in examples if example is not None]


def read_paper_task(name: str, data: Path | None = None, shifted: Sequence[str] = ()) -> Task:
    """Read every example of a task that the paper keeps, in the order of the data.

    Shifted texts, keys of `PAPER_SHIFTS`, go with OpenBookQA alone.

    Raises
    ------
    ValueError
        For unknown names, for shifted texts of another task, or for rows of another schema.
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
    return Task(
        name,
        task.classes,
        task.is_prompt,
        train=examples[task.train_source],
        test=examples[task.test_source],
        shifted={
            subject: [example for source in shift.sources for example in examples[source]]
            for subject, shift in shifts.items()
        },
        truncation_side=task.truncation_side,
    )


def read(options: TextOptions, seed: int, validation: int) -> Task:
    """Read a task and keep as many texts of it as the options ask for; no seed draws any."""
    task = read_paper_task(options.task, options.data, options.shifted)
    rest = len(task.train) - validation
    return replace(
        task,
        train=task.train[:rest][: options.train_examples],
        validation=task.train[rest:],
        test=task.test[: options.test_examples],
        shifted={
            name: examples[: options.shifted_examples] for name, examples in task.shifted.items()
        },
    )


def model(options: TextOptions) -> str:
    """The paper's model, if no other one is asked for."""
    return options.model or PAPER_TASKS[options.task].hyperparameters.model


TASKS = tuple(
    TaskSource(name, read, model, task.hyperparameters) for name, task in PAPER_TASKS.items()
)
