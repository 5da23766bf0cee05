"""The experiment on rivals at its smallest."""

import pytest

from benchmarks.methods import CALIBRATED
from benchmarks.methods.method import find_methods
from tests.benchmarks.support import run

LOW_RANK = ("last_layer", "lowrank_kron_paper", "lowrank_kron")


def test_the_benchmark_measures_every_method(tmp_path, choices):
    command = f"calibration {choices} --steps 3 --checkpoints 2"
    rows = run(command, tmp_path / "results")["methods"]
    assert {row["method"] for row in rows} == {method.key for method in CALIBRATED}
    assert rows[0]["forward_passes"] == 1  # of the model itself
    for row in rows:
        assert 0 < row["nll"] < 50
        assert row["fit_seconds"] > 0
        if row["method"] in LOW_RANK:
            assert row["regret"] >= 0  # the grid of factors has 1 in it
        else:
            assert row["regret"] is None


def test_a_method_that_is_unknown_is_refused_with_those_that_are_known():
    (diag,) = find_methods(CALIBRATED, ["Stock diag"])
    assert diag.key == "diag"
    with pytest.raises(SystemExit, match=r"'unheard of'.*kron \(Stock Kron\)"):
        find_methods(CALIBRATED, ["unheard of"])
