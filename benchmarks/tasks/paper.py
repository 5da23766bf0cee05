"""The tasks of the Laplace-LoRA paper: data, filters, prompts and hyperparameters.

The prompts follow the paper's table of templates (appendix "Prompt templates for LlaMA2
common sense reasoning tasks"). Where the table prints "choice2" for the third and
fourth choices, we take these. WinoGrande's "B" has no full stop in the table or in the
authors' program, and so has none here. We leave out the template's full stop after a
text that ends with one.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.models import MissingDataError
from benchmarks.options import TextRun
from benchmarks.tasks.task import Example, Side, Task
from benchmarks.training import Hyperparameters

LETTERS = ("A", "B", "C", "D")
SELECT = "Select one of the choices that answers the following question:"
TRUE_OR_FALSE = "Answer the question with only True or False:"
CAUSAL_HYPERPARAMETERS = Hyperparameters(
    model="meta-llama/Llama-2-7b-hf",
    target_modules=("q_proj", "v_proj", "lm_head"),
    batch_size=4,
    maximum_length=300,
)
# The paper names no layers of RoBERTa; these are PEFT's defaults, which it follows.
ENCODER_HYPERPARAMETERS = Hyperparameters(
    model="FacebookAI/roberta-base",
    target_modules=("query", "value"),
    batch_size=32,
    maximum_length=256,
)
Row = dict[str, Any]
# Makes an example from a row, or None from a row that the paper leaves out.
ToExample = Callable[[Row], Example | None]


class Source(NamedTuple):
    """One split of one configuration of a data set, as the hub names them."""

    dataset: str
    configuration: str
    split: str

    def __str__(self) -> str:
        return f"{self.dataset} ({self.configuration}), split {self.split}"

    def file_in(self, data: Path | str) -> Path:
        """Name a split's file in a folder, with a JSON object on each line."""
        return Path(data) / self.dataset / self.configuration / f"{self.split}.jsonl"

    def rows(self, data: Path | None) -> list[Row]:
        """Read the rows from a folder, or from the hub if there is none."""
        if data is None:
            from datasets import load_dataset  # a folder of files needs no such package

            rows = load_dataset(self.dataset, self.configuration, split=self.split)
            return [dict(row) for row in rows]
        text = self.file_in(data).read_text(encoding="utf-8")
        # Not at other separators, which may stand inside of a text.
        lines = text.split("\n")
        return [json.loads(line) for line in lines if line.strip()]


def read_sources(sources: Sequence[Source], data: Path | None) -> list[list[Row]]:
    """Read rows of several splits; say in one line what to download."""
    try:
        return [source.rows(data) for source in sources]
    # Without access datasets raises the first error; the second if it has cached
    # another configuration of the same data set.
    except (OSError, ValueError) as error:
        raise MissingDataError(_what_to_download(sources, data)) from error


def read_from_folder(
    dataset: tuple[str, str], data: Path | None, what_is_read: str
) -> list[list[Row]]:
    """Read the training and the test split of a data set, which no hub is asked for."""
    if data is None:
        raise MissingDataError(f"{what_is_read}: give --data FOLDER.")
    sources = [Source(*dataset, split) for split in ("train", "test")]
    return read_sources(sources, data)


def _what_to_download(sources: Sequence[Source], data: Path | None) -> str:
    if data is None:
        folder = "FOLDER"
        missing = sources
        beginning = "The hub is out of reach"
        end = ", and give --data FOLDER"
    else:
        folder = data
        missing = [source for source in sources if not source.file_in(data).is_file()]
        beginning = f"The data in {data} are incomplete"
        end = ""
    files = "; ".join(f"{source}, as {source.file_in(folder)}" for source in missing)
    return (
        f"{beginning}: download from https://huggingface.co/datasets, and save as JSON "
        f"lines, {files}{end}."
    )


@dataclass(frozen=True)
class PaperTask:
    """One of the paper's tasks; long prompts are cut on the side that matters least."""

    dataset: str
    configuration: str
    to_example: ToExample
    classes: tuple[str, ...]
    is_prompt: bool = False
    truncation_side: Side = "right"

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Return the paper's, for a causal language model or an encoder."""
        return CAUSAL_HYPERPARAMETERS if self.is_prompt else ENCODER_HYPERPARAMETERS

    @property
    def sources(self) -> tuple[Source, Source]:
        """Name the training split, and the public validation split for tests."""
        return (
            Source(self.dataset, self.configuration, "train"),
            Source(self.dataset, self.configuration, "validation"),
        )

    def read(self, options: TextRun, seed: int) -> Task:
        """Read the task, and keep the first texts, as many as the options ask for."""
        task = read_paper_task(options.task, options.data)
        return replace(
            task,
            train=task.train[: options.train_examples],
            test=task.test[: options.test_examples],
        )


# --- prompts and pairs ----------------------------------------------------------------


def with_full_stop(text: str) -> str:
    """End a text with one full stop."""
    return text if text.endswith(".") else f"{text}."


def winogrande(row: Row) -> Example:
    """Ask which of two options fills the gap."""
    sentence = row["sentence"]
    first = with_full_stop(row["option1"])
    second = with_full_stop(row["option2"])
    # As it is: a full stop after "B" would be another prompt than the authors'.
    prompt = f"{SELECT} {sentence} Choices: A. {first} B {second} Answer:"
    label = ("1", "2").index(row["answer"])
    return Example(prompt, label)


def four_choices(question: str, choices: Sequence[str], label: int) -> Example | None:
    """Ask which of four choices is right; None if there aren't four."""
    # A few questions of ARC have three or five, for which there is no letter's class.
    if len(choices) != len(LETTERS):
        return None
    lettered = []
    for letter, choice in zip(LETTERS, choices, strict=True):
        lettered.append(f"{letter}. {with_full_stop(choice)}")
    listed = " ".join(lettered)
    prompt = f"{SELECT} {question} Choices: {listed} Answer:"
    return Example(prompt, label)


def arc(row: Row) -> Example | None:
    """Ask a question of ARC, which labels its choices by letters or digits."""
    choices = row["choices"]
    label = choices["label"].index(row["answerKey"])
    return four_choices(row["question"], choices["text"], label)


def openbookqa(row: Row) -> Example | None:
    """Ask a question of OpenBookQA, whose rows are like ARC's."""
    question = row["question_stem"]
    return arc({**row, "question": question})


def boolq_label(row: Row) -> int:
    """Read BoolQ's answer, whose field has two names."""
    # SuperGLUE's copy calls it "label", and the original data "answer".
    if "label" in row:
        return int(row["label"])
    return int(row["answer"])


def boolq(row: Row) -> Example:
    """Ask whether something is true according to a passage."""
    question = row["question"]
    passage = with_full_stop(row["passage"])
    # Without "Answer:", which the template has for choices only.
    prompt = f"{TRUE_OR_FALSE} {question} Context: {passage}"
    return Example(prompt, boolq_label(row))


def boolq_pair(row: Row) -> Example:
    """Pair a passage with a question about it, for an encoder."""
    pair = (row["passage"], row["question"])
    return Example(pair, boolq_label(row))


def sentence(row: Row) -> Example:
    """Take the one sentence of CoLA, for an encoder."""
    return Example(row["sentence"], int(row["label"]))


def sentence_pair(row: Row) -> Example:
    """Pair the sentences of MRPC, RTE, WNLI or WiC (without its word)."""
    pair = (row["sentence1"], row["sentence2"])
    return Example(pair, int(row["label"]))


# --- the tasks ------------------------------------------------------------------------


def lettered(
    dataset: str,
    configuration: str,
    to_example: ToExample,
    classes: tuple[str, ...] = LETTERS,
) -> PaperTask:
    """Describe a task of prompts whose answers are letters."""
    return PaperTask(
        dataset,
        configuration,
        to_example,
        classes,
        is_prompt=True,
        truncation_side="left",  # a prompt ends with the choices
    )


def glue(
    configuration: str, to_example: ToExample, classes: tuple[str, str]
) -> PaperTask:
    """Describe a task of GLUE, for an encoder."""
    return PaperTask("nyu-mll/glue", configuration, to_example, classes)


def super_glue(
    configuration: str, to_example: ToExample, is_prompt: bool = False
) -> PaperTask:
    """Describe a task of SuperGLUE; each of them asks what is true."""
    return PaperTask(
        "aps/super_glue",
        configuration,
        to_example,
        classes=("False", "True"),
        is_prompt=is_prompt,
    )


PAPER_TASKS: dict[str, PaperTask] = {
    "winogrande_s": lettered(
        "allenai/winogrande", "winogrande_s", winogrande, LETTERS[:2]
    ),
    "winogrande_m": lettered(
        "allenai/winogrande", "winogrande_m", winogrande, LETTERS[:2]
    ),
    "arc_easy": lettered("allenai/ai2_arc", "ARC-Easy", arc),
    "arc_challenge": lettered("allenai/ai2_arc", "ARC-Challenge", arc),
    "obqa": lettered("allenai/openbookqa", "main", openbookqa),
    "boolq": super_glue("boolq", boolq, is_prompt=True),
    "mrpc": glue("mrpc", sentence_pair, ("not_equivalent", "equivalent")),
    "rte": glue("rte", sentence_pair, ("entailment", "not_entailment")),
    "cola": glue("cola", sentence, ("unacceptable", "acceptable")),
    "wic": super_glue("wic", sentence_pair),
    "wnli": glue("wnli", sentence_pair, ("not_entailment", "entailment")),
    "boolq_pairs": super_glue("boolq", boolq_pair),
}


def read_paper_task(name: str, data: Path | None = None) -> Task:
    """Read all examples of a task that the paper keeps."""
    task = PAPER_TASKS[name]
    rows_of_training, rows_of_test = read_sources(task.sources, data)
    training, test = task.sources
    return Task(
        name=name,
        classes=task.classes,
        is_prompt=task.is_prompt,
        train=_kept(task.to_example, training, rows_of_training),
        test=_kept(task.to_example, test, rows_of_test),
        truncation_side=task.truncation_side,
    )


def _kept(to_example: ToExample, source: Source, rows: list[Row]) -> list[Example]:
    """Make examples of a split's rows, without those that the paper leaves out."""
    try:
        examples = [to_example(row) for row in rows]
    except KeyError as error:
        raise ValueError(f"A row of {source}, has no field {error}.") from error
    return [example for example in examples if example is not None]
