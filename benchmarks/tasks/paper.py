"""The tasks of the Laplace-LoRA paper: data, filters and hyperparameters."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks.models import MissingDataError
from benchmarks.options import TextRun
from benchmarks.tasks import paper_prompts as prompts
from benchmarks.tasks.paper_prompts import LETTERS, Row
from benchmarks.tasks.task import Example, Task
from benchmarks.training import Hyperparameters

CAUSAL_HYPERPARAMETERS = Hyperparameters(
    "meta-llama/Llama-2-7b-hf", ("q_proj", "v_proj", "lm_head"), batch_size=4, maximum_length=300
)
# The paper names no layers of RoBERTa; these are PEFT's defaults, which it follows.
ENCODER_HYPERPARAMETERS = Hyperparameters(
    "FacebookAI/roberta-base", ("query", "value"), batch_size=32, maximum_length=256
)
# Makes an example from a row, or None from a row that the paper leaves out.
ToExample = Callable[[Row], Example | None]


class Source(NamedTuple):
    """One split of one configuration of a data set, as the hub names them."""

    dataset: str
    configuration: str
    split: str

    def file_in(self, data: Path | str) -> Path:
        """The split's file in a local folder: one JSON object per line, with the hub's fields."""
        return Path(data) / self.dataset / self.configuration / f"{self.split}.jsonl"

    def rows(self, data: Path | None) -> list[Row]:
        """Rows from a folder, or from the hub if there is none."""
        if data is None:
            from datasets import load_dataset

            rows = load_dataset(self.dataset, self.configuration, split=self.split)
            return [dict(row) for row in rows]
        text = self.file_in(data).read_text(encoding="utf-8")
        return [json.loads(line) for line in text.split("\n") if line.strip()]


def read_sources(sources: Sequence[Source], data: Path | None) -> list[list[Row]]:
    """Read the rows of several splits; if any is missing, say in one line what to download."""
    try:
        return [source.rows(data) for source in sources]
    # Without access datasets raises the first error; the second if it has cached another
    # configuration of the same data set.
    except (OSError, ValueError) as error:
        folder, beginning, end = "FOLDER", "The hub is out of reach", ", and give --data FOLDER"
        missing = sources
        if data is not None:
            folder, beginning, end = data, f"The data in {data} are incomplete", ""
            missing = [source for source in sources if not source.file_in(data).is_file()]
        files = (f"{x.dataset} ({x[1]}), split {x.split}, as {x.file_in(folder)}" for x in missing)
        raise MissingDataError(
            f"{beginning}: download from https://huggingface.co/datasets, and save as JSON lines, "
            f"{'; '.join(files)}{end}."
        ) from error


@dataclass(frozen=True)
class PaperTask:
    """One of the paper's tasks; long prompts are cut on the side that matters least."""

    dataset: str
    configuration: str
    to_example: ToExample
    classes: tuple[str, ...]
    is_prompt: bool = False
    truncation_side: Literal["left", "right"] = "right"

    @property
    def hyperparameters(self) -> Hyperparameters:
        return CAUSAL_HYPERPARAMETERS if self.is_prompt else ENCODER_HYPERPARAMETERS

    @property
    def sources(self) -> tuple[Source, Source]:
        """The training split, and the public validation split, which the paper tests on."""
        names = (self.dataset, self.configuration)
        return Source(*names, "train"), Source(*names, "validation")

    def model(self, options: TextRun) -> str:
        return options.model or self.hyperparameters.model

    def read(self, options: TextRun, seed: int) -> Task:
        """Read the task, and keep the first texts, as many as the options ask for."""
        task = read_paper_task(options.task, options.data)
        return replace(
            task,
            train=task.train[: options.train_examples],
            test=task.test[: options.test_examples],
        )


LETTERED = partial(PaperTask, classes=LETTERS, is_prompt=True, truncation_side="left")
GLUE = partial(PaperTask, "nyu-mll/glue")
SUPER_GLUE = partial(PaperTask, "aps/super_glue", classes=("False", "True"))
PAPER_TASKS: dict[str, PaperTask] = {
    **{
        name: LETTERED("allenai/winogrande", name, prompts.winogrande, classes=LETTERS[:2])
        for name in ("winogrande_s", "winogrande_m")
    },
    "arc_easy": LETTERED("allenai/ai2_arc", "ARC-Easy", prompts.arc),
    "arc_challenge": LETTERED("allenai/ai2_arc", "ARC-Challenge", prompts.arc),
    "obqa": LETTERED("allenai/openbookqa", "main", prompts.openbookqa),
    "boolq": SUPER_GLUE("boolq", prompts.boolq, is_prompt=True),
    "mrpc": GLUE("mrpc", prompts.sentence_pair, ("not_equivalent", "equivalent")),
    "rte": GLUE("rte", prompts.sentence_pair, ("entailment", "not_entailment")),
    "cola": GLUE("cola", prompts.sentence, ("unacceptable", "acceptable")),
    "wic": SUPER_GLUE("wic", prompts.sentence_pair),
    "wnli": GLUE("wnli", prompts.sentence_pair, ("not_entailment", "entailment")),
    "boolq_pairs": SUPER_GLUE("boolq", prompts.boolq_pair),
}


def read_paper_task(name: str, data: Path | None = None) -> Task:
    """Read all examples of a task that the paper keeps."""
    task = PAPER_TASKS[name]
    examples = []
    for source, rows in zip(task.sources, read_sources(task.sources, data), strict=True):
        try:
            kept = [task.to_example(row) for row in rows]
        except KeyError as error:
            where = f"{source.dataset} ({source.configuration}), split {source.split}"
            raise ValueError(f"A row of {where}, has no field {error}.") from error
        examples.append([example for example in kept if example is not None])
    side = task.truncation_side
    return Task(name, task.classes, task.is_prompt, *examples, truncation_side=side)
