"""Tiny models, and options of experiments at their smallest."""

import logging

import pytest

from benchmarks import measuring
from benchmarks.fine_tuning import prepare
from benchmarks.tasks.paper import PAPER_TASKS
from tests.benchmarks.support import parsed, save_tiny_models, write_grammar, write_task


@pytest.fixture
def in_this_process(monkeypatch):
    """Run jobs here that have processes of their own, which import everything anew."""

    def run_limited(job, arguments, limit=None):
        return list(job(*arguments)), None

    monkeypatch.setattr(measuring, "run_limited", run_limited)
    monkeypatch.setattr(measuring, "limit_memory", lambda *_: None)
    # What jobs switch off for good in their processes.
    monkeypatch.setattr(logging, "disable", lambda _: None)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    return save_tiny_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def prepared(tiny_models, tmp_path):
    """Prepare a tiny pretrained model, and made-up rows of a task of the paper."""

    def make(task, **changes):
        write_task(task, tmp_path)
        settings = {
            "task": task,
            "model": tiny_models[PAPER_TASKS[task].is_prompt],
            "data": tmp_path,
            "cache": tmp_path / "cache",
            "steps": 2,
            "batch_size": 2,
        }
        return prepare(parsed("stages --quiet", **(settings | changes)), 0)

    return make


@pytest.fixture
def choices(tiny_models, tmp_path):
    """Return options for a task of prompts, read from sources, and a tiny decoder."""
    return {
        "task": "choices",
        "model": tiny_models[True],
        "train_examples": 20,
        "test_examples": 12,
        "shifted_examples": 8,
        "files_per_library": 30,
        "steps": 10,
        "learning_rate": 0.01,
        "cache": tmp_path / "cache",
    }


@pytest.fixture
def grammar(tiny_models, tmp_path):
    """Return options for a task of two classes, and a tiny encoder."""
    write_grammar(tmp_path)
    return {
        "task": "cola",
        "data": tmp_path,
        "model": tiny_models[False],
        "steps": 20,
        "learning_rate": 0.01,
        "batch_size": 8,
        "cache": tmp_path / "cache",
    }
