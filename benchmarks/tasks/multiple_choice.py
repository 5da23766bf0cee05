"""ARC and OpenBookQA, answered by letters, or by the texts of the choices themselves.

Questions with four choices alone, as in the paper. They are trained on the training
split, and measured on the test split. What is trained on OpenBookQA is measured on ARC
too, the paper's shift.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.options import TextRun
from benchmarks.tasks.names import GEMMA
from benchmarks.tasks.paper import (
    LETTERS,
    Row,
    Source,
    ToExample,
    arc,
    openbookqa,
    read_from_folder,
    read_sources,
)
from benchmarks.tasks.task import Example, Sizes, Task
from benchmarks.training import Hyperparameters

SIZES = Sizes(train=200, test=500, shifted=300)
DataSet = tuple[str, str]  # a name and a configuration


@dataclass(frozen=True)
class MultipleChoice:
    """Questions of a data set, and what the model is asked to write."""

    name: str
    dataset: DataSet
    to_example: ToExample
    # Makes examples of ARC, if that is another data set.
    shifted_example: ToExample | None = None
    hyperparameters: Hyperparameters = GEMMA

    def read(self, options: TextRun, seed: int) -> Task:
        """Draw questions from each split, in an order that the seed says."""
        train, test = read_from_folder(
            self.dataset,
            options.data,
            f"{self.name} reads JSON lines with a question and its choices",
        )
        sizes = SIZES.asked(options)
        # One generator for all sets, which are drawn in this order.
        rng = random.Random(seed)
        return Task(
            name=self.name,
            classes=LETTERS,
            is_prompt=True,
            train=_examples(train, self.to_example, sizes.train, rng),
            test=_examples(test, self.to_example, sizes.test, rng),
            shifted=self._shifted(options.data, sizes.shifted, rng),
            # A prompt ends with the choices, without which nobody could answer.
            truncation_side="left",
        )

    def _shifted(
        self, data: Path | None, count: int, rng: random.Random
    ) -> dict[str, list[Example]]:
        """Draw questions of ARC, whose right answers are known."""
        if self.shifted_example is None:
            return {}
        shifted = {}
        for dataset in (ARC_EASY, ARC_CHALLENGE):
            _, configuration = dataset
            source = Source(*dataset, "test")
            (rows,) = read_sources([source], data)
            shifted[configuration] = _examples(rows, self.shifted_example, count, rng)
        return shifted


def _examples(
    rows: Sequence[Row], to_example: ToExample, count: int, rng: random.Random
) -> list[Example]:
    """Draw examples of the questions with four choices."""
    kept = []
    for row in rows:
        choices = row["choices"]["text"]
        # By texts too, though they could be more or fewer: both ask the same questions.
        if len(choices) == len(LETTERS):
            kept.append(row)
    rng.shuffle(kept)
    examples = [to_example(row) for row in kept[:count]]
    return [example for example in examples if example is not None]


def by_texts(row: Row) -> Example:
    """Ask a question without its choices, which stand behind it one by one."""
    question = row["question"] if "question" in row else row["question_stem"]
    choices = row["choices"]
    return Example(
        text=f"Question: {question} Answer:",
        label=choices["label"].index(row["answerKey"]),
        choices=tuple(f" {choice}" for choice in choices["text"]),
    )


ARC_EASY = ("allenai/ai2_arc", "ARC-Easy")
ARC_CHALLENGE = ("allenai/ai2_arc", "ARC-Challenge")
OBQA = ("allenai/openbookqa", "main")
ARC_EASY_TASKS = (
    MultipleChoice("arc_easy_letters", ARC_EASY, arc),
    MultipleChoice("arc_easy_texts", ARC_EASY, by_texts),
)
KEPT_CHOICES = (
    MultipleChoice("arc_challenge_letters", ARC_CHALLENGE, arc),
    MultipleChoice("arc_challenge_texts", ARC_CHALLENGE, by_texts),
    MultipleChoice("obqa_letters", OBQA, openbookqa, shifted_example=arc),
    MultipleChoice("obqa_texts", OBQA, by_texts, shifted_example=by_texts),
)
