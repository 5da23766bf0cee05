"""What the README says runs: blocks of Python, and command lines."""

from __future__ import annotations

import random
import re
import shlex
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from transformers import TrainingArguments

import laplace_lora_cli as command_line
from tests.support.models import base_model, ragged_batches
from tests.support.pages import (
    FENCE,
    PROMPTS,
    assert_probabilities,
    run,
    write_tokenizer,
)
from tests.support.trainers import trainer_of

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICK_START, READ_BACK, FOR_LAPLACE_TORCH = [code for _, code in FENCE.findall(README)]
N_TEXTS = 300  # as many as the quick start takes
EMOTIONS = ["anger", "joy", "optimism", "sadness"]


def tweets(*_: str) -> DatasetDict:
    """Make texts in place of those that are on the hub."""
    generator = random.Random(0)
    words = " ".join(PROMPTS).split()
    texts = [" ".join(generator.choices(words, k=8)) for _ in range(N_TEXTS)]
    labels = [number % len(EMOTIONS) for number in range(N_TEXTS)]
    features = Features({"text": Value("string"), "label": ClassLabel(names=EMOTIONS)})
    rows = Dataset.from_dict({"text": texts, "label": labels}, features)
    return DatasetDict(train=rows, test=rows)


@pytest.mark.filterwarnings("ignore")  # of models that have learnt nothing
def test_the_quick_start_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("datasets.load_dataset", tweets)
    # In place of fifteen epochs.
    few_steps = partial(TrainingArguments, max_steps=10)
    monkeypatch.setattr("transformers.TrainingArguments", few_steps)
    # What is in the folder is found before the hub is asked.
    monkeypatch.chdir(tmp_path)
    encoder = tmp_path / "sentence-transformers" / "all-MiniLM-L6-v2"
    base_model("bert", n_labels=len(EMOTIONS)).save_pretrained(encoder)
    write_tokenizer(encoder)
    run(QUICK_START, {}, "README.md")
    table, _, queue = capsys.readouterr().out.partition("are decided alone.")
    assert re.search("trained(.|\n)+posterior", table)
    assert len(re.findall(r"^  \S", queue, re.MULTILINE)) == 3
    names = {}
    run(READ_BACK, names, "README.md")
    assert names["la"].n_outputs == len(EMOTIONS)


@pytest.mark.filterwarnings("ignore")  # of models that have learnt nothing
def test_the_lines_for_users_of_laplace_torch_run(tmp_path):
    batches = ragged_batches()
    names = {
        "trainer": trainer_of(tmp_path),
        "train_loader": batches,
        "validation_loader": batches,
        "batch": batches[0],
    }
    run(FOR_LAPLACE_TORCH, names, "README.md")
    assert_probabilities(names["probs"])


def test_every_file_tells_the_same_version():
    own = version("laplace-lora-ext")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## {own} " in changes
    assert f"version: {own}\n" in citation


def command_lines(program: str) -> list[str]:
    """Find what follows a program's name on any page."""
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
    ]
    found = set()
    for path in pages:
        # Lines that go on are one.
        page = re.sub(r"\\\n\s*", " ", path.read_text(encoding="utf-8"))
        # Up to the end of the code, the next command, a comment or a redirection.
        for arguments in re.findall(rf"{program}([^`\n&;#|>]*)", page):
            found.add(" ".join(arguments.split()))
    return sorted(found)


def test_every_command_line_is_understood():
    main = pytest.importorskip("benchmarks.__main__")
    lines = command_lines("python -m benchmarks")
    assert len(lines) > 5
    for line in lines:
        words = shlex.split(line)
        # Help is printed, and the program ends.
        if words and "--help" not in words:
            main.build_parser().parse_args(words)


def test_every_command_of_ours_is_understood():
    lines = command_lines("laplace-lora ")
    assert any(line.startswith("calibrate ") for line in lines)
    for line in lines:
        name, *words = shlex.split(line)
        # What names no adapter is a part of a line.
        if "--adapter" in words:
            command_line._parse(name, words)
