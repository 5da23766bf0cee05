"""Tiny models, and command lines of experiments at their smallest."""

import logging

import pytest

from benchmarks import measuring
from benchmarks.fine_tuning import prepare
from benchmarks.tasks.paper import PAPER_TASKS
from tests.benchmarks.support import parsed, save_tiny, write_intents, write_rows


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
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    return save_tiny("RobertaModel", "right", folder)


@pytest.fixture(scope="session")
def decoder(tmp_path_factory):
    # As Gemma's tokenizer pads.
    return save_tiny("LlamaForCausalLM", "left", tmp_path_factory.mktemp("decoder"))


@pytest.fixture
def choices(decoder, tmp_path):
    """Return options for a task of prompts, read from sources, and a tiny decoder."""
    return (
        f"--task choices --model {decoder} --train-examples 20 --test-examples 12 "
        "--shifted-examples 8 --files-per-library 30 --steps 10 --learning-rate 0.01 "
        f"--cache {tmp_path}/cache"
    )


@pytest.fixture
def grammar(encoder, tmp_path):
    """Return options for a task of two classes, and a tiny encoder."""
    rows = []
    for number in range(24):
        verb = "rains" if number % 2 else "rain"
        # Each sentence twice: with its own label, and with one that tells nothing.
        for label in (number % 2, (number // 5) % 2):
            rows.append({"sentence": f"It {verb} {number}.", "label": label})
    for source in PAPER_TASKS["cola"].sources:
        write_rows(rows, source.file_in(tmp_path))
    return (
        f"--task cola --data {tmp_path} --model {encoder} --steps 20 --batch-size 8 "
        f"--learning-rate 0.01 --cache {tmp_path}/cache"
    )


@pytest.fixture
def travel(encoder, tmp_path, monkeypatch):
    """Return options for intents of one domain, and a tiny encoder."""
    monkeypatch.setattr("benchmarks.models.encoder_folder", lambda: encoder)
    write_intents({"travel": "abcde"}, 12, tmp_path)
    return (
        "--quiet --steps 60 --learning-rate 0.03 --checkpoints 1 "
        f"--test-examples 60 --data {tmp_path} --cache {tmp_path}/cache"
    )


@pytest.fixture
def prepared(grammar):
    """Prepares a tiny pretrained model, and eight training texts, by options."""

    def make(options):
        command = f"stages --quiet {grammar} --train-examples 8 {options}"
        return prepare(parsed(command), 0)

    return make
