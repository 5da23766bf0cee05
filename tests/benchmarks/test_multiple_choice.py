"""ARC and OpenBookQA by letters and by the choices' texts."""

from pathlib import Path

import pytest
import torch

from benchmarks.fine_tuning import TRAIN, prepare
from benchmarks.models import MissingDataError
from benchmarks.tasks import TASKS
from benchmarks.tasks.multiple_choice import ARC_EASY_TASKS, KEPT_CHOICES
from laplace_lora_ext.models.logits_model import LogitsModel
from tests.benchmarks.support import arc_row, parsed, rows_by, run, write_rows

MULTIPLE_CHOICE = (*ARC_EASY_TASKS, *KEPT_CHOICES)
# One is longer than the others, by several tokens.
CHOICES = ["a pear", "a stone", "a spoon and a lamp", "a lamp"]
N_QUESTIONS = {"train": 24, "test": 8}


def questions(count: int) -> list[dict]:
    """Make as many questions with four choices, and one with three."""
    rows = [
        arc_row(f"What grows {number}?", CHOICES, answer="ABCD"[number % 4])
        for number in range(count)
    ]
    return [*rows, arc_row("What grows?", CHOICES[:3], answer="A", labels="ABC")]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder of questions of each data set, of which one has three choices."""
    root = tmp_path_factory.mktemp("data")
    for task in MULTIPLE_CHOICE:
        name, configuration = task.dataset
        for split, n_questions in N_QUESTIONS.items():
            rows = questions(n_questions)
            if "openbookqa" in name:
                for row in rows:
                    row["question_stem"] = row.pop("question")
            write_rows(rows, root / name / configuration / f"{split}.jsonl")
    return root


@pytest.mark.parametrize("task", MULTIPLE_CHOICE, ids=lambda task: task.name)
def test_each_question_stays_the_same_and_has_four_choices(task, data, tiny_models):
    given = {"task": task.name, "data": data, "model": tiny_models[True]}
    options = parsed("stages --quiet", **given)
    found, again, other = (TASKS[task.name].read(options, seed) for seed in (0, 0, 1))
    # The question with three choices is left out.
    assert len(found.train) == N_QUESTIONS["train"]
    assert len(found.test) == N_QUESTIONS["test"]
    assert again == found
    assert other.train != found.train

    pretrained = prepare(options, 0)
    batch = next(iter(pretrained.loader(pretrained.data[TRAIN])))
    model = LogitsModel(pretrained.load(), pretrained.class_token_ids)
    assert model(batch).shape == (len(batch["labels"]), 4)
    first = pretrained.task.train[0]
    if not pretrained.task.has_choices:
        assert " Choices: A. a pear." in first.text
        return
    choices = [f" {choice}" for choice in CHOICES]
    assert list(first.choices) == choices
    # All tokens of a choice are scored, and none of the question.
    tokens = pretrained.tokenizer(choices, add_special_tokens=False)["input_ids"]
    n_scored = batch["score_mask"][0].sum(-1)
    assert n_scored.tolist() == [len(of_choice) for of_choice in tokens]


def test_data_must_be_given(tiny_models):
    options = parsed("stages --quiet", task="obqa_texts", model=tiny_models[True])
    with pytest.raises(MissingDataError, match="give --data FOLDER"):
        TASKS["obqa_texts"].read(options, 0)


def test_stages_run_on_choices_of_several_tokens(data, tiny_models, tmp_path):
    torch.manual_seed(0)
    finished = run(
        tmp_path / "results",
        "stages",
        task="obqa_texts",
        data=data,
        model=tiny_models[True],
        steps=6,
        members=1,
        cache=tmp_path / "cache",
        smoothing=[],
    )
    rows = rows_by(finished.figures["methods"], "method", "prior")
    assert ("staged_1_student", "swapped") in rows
    # Long choices are far less probable than short ones to a model that has learnt
    # nothing.
    assert all(0 < row["nll"] < 100 for row in rows.values())
    shifted = rows["staged_1", "held_out"]["shifted"]
    assert set(shifted) == {"ARC-Easy", "ARC-Challenge"}
    assert all("nll" in of_set for of_set in shifted.values())
