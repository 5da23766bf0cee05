"""The experiment on how many passes a fit needs, at its smallest."""

from benchmarks.experiments import signs
from tests.benchmarks.support import run


def test_fits_by_draws_stand_beside_the_exact_one(travel, tmp_path, monkeypatch):
    monkeypatch.setattr(signs, "BROAD", 1e-9)
    command = f"signs --task travel {travel} --train-examples 20 --passes 1 3"
    exact, *drawn = run(command, tmp_path / "results")["rows"]
    assert exact["name"] == "exact"
    assert exact["passes"] == 4
    assert exact["covariance"] == exact["probability_broad"] == 0
    assert [row["name"] for row in drawn] == 4 * ["labels"] + 4 * ["signs"]
    assert [row["passes"] for row in drawn] == 2 * [1, 1, 3, 3]
    assert all(row["covariance_broad"] > 0 for row in drawn)
