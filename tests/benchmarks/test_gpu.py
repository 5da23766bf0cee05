"""The benchmark of large models on one card, tried with a tiny one."""

from tests.benchmarks.support import rows_with, run

JOBS = {
    "training step",
    "fit",
    "exact prediction",
    "agreement",
    "amortize",
    "amortized prediction",
    "student's step",
    "stock diag, fit",
    "stock Kron, fit",
}


def test_the_page_of_a_tiny_model(tmp_path, monkeypatch):
    # Dense algebra takes 64 times as long at four times the rank.
    monkeypatch.setattr("benchmarks.experiments.gpu.RANK", 2)
    command = "gpu --quiet --tiny --device cpu --lengths 8 16 --minutes 60"
    figures = run(command, tmp_path)
    exact = rows_with(figures["exactness"], dtype="float64")
    assert {row["checkpointed"] for row in exact} == {True, False}
    # Of float64, whose rounding is all that differs.
    for row in exact:
        assert max(row["jacobians"], row["covariance"], row["evidence"]) < 1e-9
    in_half_precision = rows_with(figures["rows"], weights="bfloat16")
    assert {row["job"] for row in in_half_precision} == JOBS
    assert not figures["failures"]
    for row in figures["rows"]:
        assert row["seconds"] > 0
