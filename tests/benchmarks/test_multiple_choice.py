"""ARC and OpenBookQA by letters and by the choices' texts."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.fine_tuning import TRAIN, prepare
from benchmarks.models import MissingDataError
from benchmarks.tasks import TASKS
from benchmarks.tasks.multiple_choice import MULTIPLE_CHOICE
from laplace_lora_ext.models.logits_model import LogitsModel
from tests.benchmarks.support import arc_row, parsed, run

CHOICES = ["a pear", "a stone", "a spoon and a lamp", "a lamp"]


@pytest.fixture
def data(tmp_path) -> Path:
    """Write questions of each data set, of which one has three choices."""
    for task in MULTIPLE_CHOICE:
        folder = tmp_path / "data" / task.dataset[0] / task.dataset[1]
        folder.mkdir(parents=True, exist_ok=True)
        for split, count in (("train", 24), ("test", 8)):
            rows = [
                arc_row(f"What grows {number}?", CHOICES, "ABCD"[number % 4])
                for number in range(count)
            ]
            rows.append(arc_row("What grows?", CHOICES[:3], "A", labels="ABC"))
            if "openbookqa" in task.dataset[0]:
                for row in rows:
                    row["question_stem"] = row.pop("question")
            text = "\n".join(json.dumps(row) for row in rows)
            (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
    return tmp_path / "data"


@pytest.mark.parametrize("task", MULTIPLE_CHOICE, ids=lambda task: task.name)
def test_each_question_has_four_choices_and_stays_the_same(task, data, tiny_models):
    options = parsed(
        "stages --quiet", task=task.name, data=data, model=tiny_models[True]
    )
    read = TASKS[task.name].read(options, 0)
    assert (len(read.train), len(read.test)) == (24, 8)
    assert read == TASKS[task.name].read(options, 0)
    assert read.train != TASKS[task.name].read(options, 1).train
    pretrained = prepare(options, 0)
    batch = next(iter(pretrained.loader(pretrained.data[TRAIN])))
    logits = LogitsModel(pretrained.load(), pretrained.class_token_ids)(batch)
    assert logits.shape == (len(batch["labels"]), 4)
    if read.has_choices:
        assert read.train[0].choices == tuple(f" {choice}" for choice in CHOICES)
        tokens = [int(row.sum()) for row in batch["score_mask"][0]]
        expected = [
            len(
                pretrained.tokenizer(f" {choice}", add_special_tokens=False)[
                    "input_ids"
                ]
            )
            for choice in CHOICES
        ]
        assert tokens == expected
    else:
        assert " Choices: A. a pear." in read.train[0].text


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
    rows = {(row["method"], row["prior"]): row for row in finished.figures["methods"]}
    assert ("staged_1", "held_out") in rows
    assert ("staged_1_student", "training_texts") in rows
    # Long choices are far less probable than short ones to a model that has learnt
    # nothing.
    assert all(0 < row["nll"] < 100 for row in rows.values())
    shifted = rows["staged_1", "held_out"]["shifted"]
    assert set(shifted) == {"ARC-Easy", "ARC-Challenge"}
    assert all("nll" in of_set for of_set in shifted.values())
