"""The experiment on what few held-out texts choose, at its smallest."""

import pytest
import torch

from benchmarks.experiments.few import held_of
from tests.benchmarks.support import run


def test_few_texts_choose_for_all_others(travel, tmp_path):
    command = f"few --task travel --classes 3 1 {travel} --train-examples 20"
    figures = run(f"{command} --held 1 4 11 --draws 4", tmp_path / "results")
    assert figures["task"]["classes"] == ["d", "b"]
    rows = figures["rows"]
    assert [row["held_out"] for row in rows] == [2, 8, 22]
    for row in rows:
        for way in ("temperature", "posterior"):
            assert row[f"worst_{way}"] >= row[way]
        assert row["best"] == rows[0]["best"]
    # All but two of 24 texts choose as all do.
    assert rows[-1]["posterior"] == pytest.approx(rows[-1]["best"], rel=0.1)


def test_held_out_texts_are_of_each_class():
    labels = torch.tensor([0, 1, 1, 0, 2, 1, 0, 2])
    found = [held_of(labels, 2, seed) for seed in (0, 1)]
    for is_held in found:
        assert labels[is_held].bincount().tolist() == [2, 2, 2]
    assert not torch.equal(*found)
