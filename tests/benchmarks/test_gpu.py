"""The benchmark of large models on one card, tried with a tiny one."""

from benchmarks.experiments.gpu import Jobs
from tests.benchmarks.support import run

TINY = {"device": "cpu", "lengths": [8, 16]}


def test_the_page_of_a_tiny_model(tmp_path, capsys):
    finished = run(capsys, tmp_path, "gpu --quiet --tiny", **TINY, minutes=60)
    figures = finished.figures
    exact = [row for row in figures["exactness"] if row["dtype"] == "float64"]
    assert {row["checkpointed"] for row in exact} == {True, False}
    for row in exact:
        assert max(row["jacobians"], row["covariance"], row["evidence"]) < 1e-9
    jobs = {row["job"] for row in figures["rows"] if row["weights"] == "bfloat16"}
    assert jobs == {*Jobs.OURS, *Jobs.RIVALS}
    assert all(row["seconds"] > 0 for row in figures["rows"])
    assert "Largest difference" in finished.printed


def test_no_job_begins_when_the_minutes_are_over(tmp_path, capsys):
    finished = run(capsys, tmp_path, "gpu --quiet --tiny", **TINY, minutes=1e-9)
    assert finished.figures["rows"] == []
