"""The main job at its smallest, and the parts of it that a mistake would hide in."""

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks.contestants import all_contestants
from benchmarks.docstrings import LIBRARIES, docstring_summaries, masked, read_splits
from benchmarks.metrics import brier_score, entropy, quality, reliability, shift_detection
from benchmarks.minilm import encoder_folder


def test_the_main_job_writes_table_figures_and_diagram(tmp_path):
    options = {
        "--output": tmp_path / "results",
        "--train-examples": 15,
        "--validation-examples": 10,
        "--test-examples": 10,
        "--shifted-examples": 6,
        "--files-per-library": 40,
        "--epochs": 1,
        "--samples": 100,
        "--threads": 1,
    }
    arguments = [str(part) for option in options.items() for part in option]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert run.returncode == 0, run.stderr
    figures = json.loads((tmp_path / "results" / "figures.json").read_text())
    names = [method["name"] for method in figures["methods"]]
    assert names == [contestant.name for contestant in all_contestants("layerwise", "probit")]
    for method in figures["methods"]:
        assert method["name"] in run.stdout
        assert 0 < method["nll"] < 10
    assert (tmp_path / "results" / "table.md").read_text().count("\n| ") == len(names) + 2
    assert (tmp_path / "results" / "reliability.png").read_bytes().startswith(b"\x89PNG")
    assert "Training" in run.stderr  # a progress bar


def test_help_explains_every_option():
    text = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "--prior-structure" in text
    assert "default: 1000" in text


def test_summaries_are_those_of_public_functions_and_classes():
    source = '''
def shown(x):
    """First line
    goes on.

    Second paragraph.
    """

def _hidden():
    """Not public."""

class Shown:
    """A class."""

    def method(self):
        """A method."""

def bare(): ...
'''
    found = {name: " ".join(text.split()) for name, text in docstring_summaries(source)}
    assert set(found) == {"shown", "Shown", "method"}
    summaries = list(found.values())
    assert "First line goes on." in summaries
    assert "A class." in summaries
    assert not any("Not public" in summary or "Second" in summary for summary in summaries)


@pytest.mark.parametrize(
    "text", ["NumPy array", "a np.ndarray", "PyTorch tensor", "nx.Graph", "SymPyError", "scipy's"]
)
def test_library_names_are_masked(text):
    for name in ("numpy", "scipy", "networkx", "sympy", "torch", "np.", "nx."):
        assert name not in masked(text).lower()


def test_splits_are_balanced_disjoint_and_reproducible():
    sizes = {"train_examples": 10, "validation_examples": 5, "test_examples": 15}
    draw = {"shifted_examples": 5, "seed": 3, "files_per_library": 30, "show_progress": False}
    first, second = read_splits(**sizes, **draw), read_splits(**sizes, **draw)
    assert first == second
    texts = [text for part in (first.train, first.validation, first.test) for text, _ in part]
    assert len({text.casefold() for text in texts}) == 30
    labels = [label for _, label in first.test]
    assert sorted(labels) == sorted(list(range(len(LIBRARIES))) * 3)


def test_the_encoders_weights_are_checked(monkeypatch):
    monkeypatch.setattr("benchmarks.minilm.WEIGHTS_SHA256", "0" * 64)
    with pytest.raises(RuntimeError, match="SHA-256"):
        encoder_folder()


def test_figures_of_known_predictions():
    labels = torch.tensor([0, 1, 1, 0])
    sure = torch.eye(2)[labels]
    perfect = quality(sure, labels)
    assert perfect["accuracy"] == 1
    assert perfect["nll"] == perfect["ece"] == perfect["brier"] == 0
    wrong = sure.flip(1)
    assert brier_score(wrong, labels) == 2
    assert quality(wrong, labels)["ece"] == 1
    even = torch.full((4, 2), 0.5)
    assert quality(even, labels)["nll"] == pytest.approx(0.6931, abs=1e-4)
    assert entropy(even) == pytest.approx([0.6931] * 4, abs=1e-4)
    assert shift_detection(sure, even)["shift_auroc"] == 1
    bins = reliability(0.3 * sure + 0.7 * even, labels)
    (filled,) = [content for content in bins if content["accuracy"] is not None]
    assert filled["share"] == filled["accuracy"] == 1
    assert filled["confidence"] == pytest.approx(0.65)
    assert quality(0.3 * sure + 0.7 * even, labels)["ece"] == pytest.approx(0.35, abs=1e-6)


def test_the_tuning_benchmark_writes_tables_figures_and_plots(tmp_path):
    options = {
        "--output": tmp_path / "results",
        "--train-examples": 15,
        "--validation-examples": 10,
        "--test-examples": 10,
        "--shifted-examples": 5,
        "--files-per-library": 40,
        "--epochs": 1,
        "--samples": 100,
        "--threads": 1,
        "--grid-size": 5,
        "--stock-grid-size": 1,
        "--steps": 20,
    }
    arguments = [str(part) for option in options.items() for part in option]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", "tuning", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert run.returncode == 0, run.stderr
    figures = json.loads((tmp_path / "results" / "tuning.json").read_text())
    for row in (*figures["costs"], *figures["choices"]):
        assert row["name"] in run.stdout
    for cost in figures["costs"]:
        assert cost["seconds"] > 0
    for choice in figures["choices"]:
        for link in ("probit", "mc", "mean_field"):
            assert 0 < choice[f"{link}_nll"] < 10
    assert sum(figures["variance_by_layer"].values()) == pytest.approx(1)
    for plot in ("tuning.png", "variance_by_layer.png"):
        assert (tmp_path / "results" / plot).read_bytes().startswith(b"\x89PNG")
