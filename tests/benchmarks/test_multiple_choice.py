"""ARC and OpenBookQA by letters and by the choices' texts."""

from pathlib import Path

import pytest
import torch

from benchmarks.fine_tuning import TRAIN, prepare
from benchmarks.models import MissingDataError
from benchmarks.tasks import TASKS
from benchmarks.tasks.multiple_choice import MULTIPLE_CHOICE
from laplace_lora_ext.models.logits_model import LogitsModel
from tests.benchmarks.support import arc_row, parsed, rows_by, run, write_rows

CHOICES = ["a pear", "a stone", "a spoon and a lamp", "a lamp"]


@pytest.fixture
def data(tmp_path) -> Path:
    """A folder of questions of each data set, of which one has three choices."""
    for task in MULTIPLE_CHOICE:
        name, configuration = task.dataset
        folder = tmp_path / "data" / name / configuration
        for split, n_questions in (("train", 24), ("test", 8)):
            rows = [
                arc_row(f"What grows {number}?", CHOICES, "ABCD"[number % 4])
                for number in range(n_questions)
            ]
            rows.append(arc_row("What grows?", CHOICES[:3], "A", labels="ABC"))
            if "openbookqa" in name:
                for row in rows:
                    row["question_stem"] = row.pop("question")
            write_rows(rows, folder / f"{split}.jsonl")
    return tmp_path / "data"


@pytest.mark.parametrize("task", MULTIPLE_CHOICE, ids=lambda task: task.name)
def test_each_question_has_four_choices_and_stays_the_same(task, data, tiny_models):
    options = parsed(
        "stages --quiet",
        task=task.name,
        data=data,
        model=tiny_models[True],
    )

    def read(seed):
        return TASKS[task.name].read(options, seed)

    found = read(0)
    assert len(found.train) == 24
    assert len(found.test) == 8
    assert found == read(0)
    assert found.train != read(1).train

    pretrained = prepare(options, 0)
    batch = next(iter(pretrained.loader(pretrained.data[TRAIN])))
    model = LogitsModel(pretrained.load(), pretrained.class_token_ids)
    assert model(batch).shape == (len(batch["labels"]), 4)
    first = found.train[0]
    if found.has_choices:
        choices = [f" {choice}" for choice in CHOICES]
        assert list(first.choices) == choices
        tokens = pretrained.tokenizer(choices, add_special_tokens=False)["input_ids"]
        n_tokens = [len(of_choice) for of_choice in tokens]
        assert batch["score_mask"][0].sum(-1).tolist() == n_tokens
    else:
        assert " Choices: A. a pear." in first.text


def test_data_must_be_given(tiny_models):
    options = parsed("stages --quiet", task="obqa_texts", model=tiny_models[True])
    with pytest.raises(MissingDataError, match="give --data FOLDER"):
        TASKS["obqa_texts"].read(options, 0)


def test_stages_run_on_choices_of_several_tokens(data, tiny_models, tmp_path, capsys):
    torch.manual_seed(0)
    finished = run(
        capsys,
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
    assert ("staged_1_student", "training_texts") in rows
    # Long choices are far less probable than short ones to a model that has learnt
    # nothing.
    for row in rows.values():
        assert 0 < row["nll"] < 100
    shifted = rows["staged_1", "held_out"]["shifted"]
    assert set(shifted) == {"ARC-Easy", "ARC-Challenge"}
    for of_set in shifted.values():
        assert "nll" in of_set
