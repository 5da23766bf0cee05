"""The benchmark of large models on one card, tried with a tiny one."""

from benchmarks.experiments.gpu import Jobs
from tests.benchmarks.support import rows_with, run

TINY = {"device": "cpu", "lengths": [8, 16]}


def test_the_page_of_a_tiny_model(tmp_path, capsys):
    finished = run(capsys, tmp_path, "gpu --quiet --tiny", **TINY, minutes=60)
    figures = finished.figures
    exact = rows_with(figures["exactness"], dtype="float64")
    assert {row["checkpointed"] for row in exact} == {True, False}
    for row in exact:
        assert row["jacobians"] < 1e-9
        assert row["covariance"] < 1e-9
        assert row["evidence"] < 1e-9
    in_half_precision = rows_with(figures["rows"], weights="bfloat16")
    jobs = {row["job"] for row in in_half_precision}
    assert jobs == {*Jobs.OURS, *Jobs.RIVALS}
    for row in figures["rows"]:
        assert row["seconds"] > 0
    assert "Largest difference" in finished.printed


def test_no_job_begins_when_the_minutes_are_over(tmp_path, capsys):
    finished = run(capsys, tmp_path, "gpu --quiet --tiny", **TINY, minutes=1e-9)
    assert finished.figures["rows"] == []
