"""The paper's table of costs at a small shape, and its need of a GPU."""

import pytest
import torch

from benchmarks.__main__ import main
from tests.benchmarks.support import run

SMALL = {
    "device": "cpu",
    "hidden_size": 32,
    "layers": 1,
    "heads": 2,
    "intermediate_size": 40,
    "vocabulary": 50,
    "batch_size": 2,
    "length": 6,
    "batches": 2,
    "steps": 2,
}


def test_the_table_at_a_small_shape(tmp_path, capsys):
    figures, printed, _ = run(capsys, tmp_path, "table7b", **SMALL, classes=[2, 3])
    assert [row["classes"] for row in figures["rows"]] == [2, 3]
    for row in figures["rows"]:
        assert row["training_seconds"] == 10_000 * row["step"]["median"] > 0
        share = row["fit_seconds"] / row["training_seconds"]
        assert row["time_overhead_percent"] == pytest.approx(100 * share)
        assert row["with_laplace_gigabytes"] >= row["training_gigabytes"] > 0
        assert row["memory_overhead_percent"] >= 0
    assert figures["machine"]["processor"]
    assert "1 to 5 %" in printed


def test_it_needs_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = tmp_path / "results"
    for options in ([], ["--device", "cpu"]):
        with pytest.raises(SystemExit, match=r"6\.7 billion weights needs a GPU"):
            main(["table7b", "--output", str(folder), *options])
    assert not folder.exists()
