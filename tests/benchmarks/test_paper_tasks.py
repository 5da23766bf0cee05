"""The paper's tasks, each read from a few made-up rows of its schema."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks.models import MissingDataError
from benchmarks.tasks.paper import (
    CAUSAL_HYPERPARAMETERS,
    ENCODER_HYPERPARAMETERS,
    PAPER_TASKS,
    read_paper_task,
)
from tests.benchmarks.support import (
    PROMPTS,
    ROWS,
    parsed,
    write_rows,
    write_task,
)


def test_every_task_has_rows_here():
    assert list(ROWS) == list(PAPER_TASKS)


@pytest.mark.parametrize("name", ROWS)
def test_rows_become_the_papers_prompts_and_pairs(name, tmp_path):
    write_task(name, tmp_path)
    task = read_paper_task(name, tmp_path)
    _, expected = ROWS[name]
    assert task.train == expected
    assert task.test == expected[:1]
    assert task.name == name
    assert task.is_prompt == (expected[0][0] in PROMPTS)
    assert task.shifted == {}
    assert all(0 <= label < len(task.classes) for _, label in task.train)


@pytest.mark.parametrize("name", ROWS)
def test_the_hub_is_asked_by_its_own_names(name, monkeypatch):
    rows, expected = ROWS[name]
    asked = []

    def load_dataset(dataset, configuration, split):
        asked.append((dataset, configuration, split))
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_paper_task(name).test == expected
    task = PAPER_TASKS[name]
    names = (task.dataset, task.configuration)
    assert asked == [(*names, "train"), (*names, "validation")]


def test_the_answer_is_the_class_of_its_label():
    yes = {"question": "is ice cold", "passage": "Ice is cold.", "answer": True}
    for name in ("boolq", "boolq_pairs"):
        task = PAPER_TASKS[name]
        assert task.classes[task.to_example(yes).label] == "True"
    assert PAPER_TASKS["winogrande_s"].classes == ("A", "B")
    assert PAPER_TASKS["obqa"].classes == ("A", "B", "C", "D")
    # The hub's names of the labels 0 and 1, which these two order differently.
    assert PAPER_TASKS["rte"].classes == ("entailment", "not_entailment")
    assert PAPER_TASKS["wnli"].classes == ("not_entailment", "entailment")


def test_what_is_cut_of_a_long_prompt_is_not_where_the_answer_comes_from():
    for name, task in PAPER_TASKS.items():
        ends_with_choices = name not in ("boolq", "boolq_pairs") and task.is_prompt
        assert task.truncation_side == ("left" if ends_with_choices else "right")


def test_so_many_texts_are_kept_as_asked_for(tmp_path):
    write_task("mrpc", tmp_path)
    write_rows(PAPER_TASKS["mrpc"].sources[0], tmp_path, ROWS["mrpc"][0] * 3)
    options = parsed("stages --quiet", task="mrpc", data=tmp_path, train_examples=3)
    task = PAPER_TASKS["mrpc"].read(options, 0)
    assert [len(part) for part in (task.train, task.test)] == [3, 1]


def test_hyperparameters_are_the_papers():
    for name, task in PAPER_TASKS.items():
        expected = CAUSAL_HYPERPARAMETERS if task.is_prompt else ENCODER_HYPERPARAMETERS
        assert task.hyperparameters is expected, name
    for shared in (CAUSAL_HYPERPARAMETERS, ENCODER_HYPERPARAMETERS):
        assert (shared.rank, shared.alpha, shared.dropout) == (8, 16, 0.1)
        assert shared.learning_rate == 5e-5
        assert (shared.steps, shared.checkpoints) == (10_000, 10)
    assert (CAUSAL_HYPERPARAMETERS.batch_size, CAUSAL_HYPERPARAMETERS.maximum_length) == (4, 300)
    assert (ENCODER_HYPERPARAMETERS.batch_size, ENCODER_HYPERPARAMETERS.maximum_length) == (32, 256)


def test_without_access_one_line_says_what_to_download(tmp_path):
    program = """
import os, socket
socket.getaddrinfo = socket.socket.connect = lambda *_, **__: os._exit(3)
from benchmarks.tasks.paper import read_paper_task
read_paper_task("winogrande_s")
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
    )
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    assert run.stderr.splitlines()[-1] == (
        "The hub is out of reach: download from https://huggingface.co/datasets, and save as JSON "
        "lines, allenai/winogrande (winogrande_s), split train, as "
        "FOLDER/allenai/winogrande/winogrande_s/train.jsonl; allenai/winogrande (winogrande_s), "
        "split validation, as FOLDER/allenai/winogrande/winogrande_s/validation.jsonl, and give "
        "--data FOLDER."
    )


def test_every_missing_file_is_named_at_once(tmp_path):
    write_task("obqa", tmp_path)
    folder = tmp_path / "allenai" / "openbookqa" / "main"
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").unlink()
    with pytest.raises(MissingDataError) as error:
        read_paper_task("obqa", tmp_path)
    assert str(error.value) == (
        f"The data in {tmp_path} are incomplete: download from https://huggingface.co/datasets, "
        "and save as JSON lines, allenai/openbookqa (main), split train, as "
        f"{folder}/train.jsonl; allenai/openbookqa (main), split validation, as "
        f"{folder}/validation.jsonl."
    )


def test_rows_of_another_schema_are_refused_by_name(tmp_path):
    write_task("rte", tmp_path)
    write_rows(PAPER_TASKS["rte"].sources[1], tmp_path, [{"premise": "It rains.", "label": 0}])
    with pytest.raises(ValueError, match=r"nyu-mll/glue \(rte\), split validation.*'sentence1'"):
        read_paper_task("rte", tmp_path)
