"""Tiny models that are fine-tuned on made-up rows of the paper's tasks."""

import logging

import pytest
import transformers

from benchmarks import measuring
from benchmarks.fine_tuning import prepare
from benchmarks.tasks.paper import PAPER_TASKS
from tests.benchmarks.support import parsed, save_tiny_models, write_intents, write_task


@pytest.fixture
def in_this_process(monkeypatch):
    """Run jobs here that have processes of their own, which import everything anew."""

    def run_limited(job, arguments, limit=None):
        return list(job(*arguments)), None

    monkeypatch.setattr(measuring, "run_limited", run_limited)
    monkeypatch.setattr(measuring, "run_alone", lambda job, *each: job(*each))
    monkeypatch.setattr(measuring, "limit_memory", lambda *_: None)
    # What jobs switch off for good in their processes.
    monkeypatch.setattr(logging, "disable", lambda _: None)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    return save_tiny_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def prepared(tiny_models, tmp_path):
    """Prepare a tiny trained model, and made-up rows of a task of the paper."""

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
def encoder(tiny_models, tmp_path):
    """Save a tiny encoder without its head, in a folder."""
    folder = tmp_path / "encoder"
    for part in (transformers.AutoModel, transformers.AutoTokenizer):
        part.from_pretrained(tiny_models[False]).save_pretrained(folder)
    return folder


@pytest.fixture
def intents(encoder, tmp_path, monkeypatch):
    """Write made-up intents, as many as asked, to be learnt by a tiny encoder."""
    monkeypatch.setattr("benchmarks.tasks.intents.encoder_folder", lambda: encoder)

    def write(n_intents, n_texts=4):
        names = "abcdefghijkl"[:n_intents]
        write_intents({"travel": names}, n_texts, tmp_path)
        return tmp_path

    return write
