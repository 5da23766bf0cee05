"""The benchmark of large models on one card, tried with a tiny one."""

from benchmarks.experiments.gpu import Page, settings_of
from benchmarks.options import Gpu
from tests.benchmarks.support import rows_with, run, values_of

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
TINY = {"device": "cpu", "lengths": [8, 16]}


def test_the_page_of_a_tiny_model(tmp_path):
    finished = run(tmp_path, "gpu --quiet --tiny", **TINY, minutes=60)
    exact = rows_with(finished.figures["exactness"], dtype="float64")
    assert set(values_of(exact, "checkpointed")) == {True, False}
    # Of float64, whose rounding is all that differs.
    for row in exact:
        assert row["jacobians"] < 1e-9
        assert row["covariance"] < 1e-9
        assert row["evidence"] < 1e-9
    in_half_precision = rows_with(finished.rows, weights="bfloat16")
    assert set(values_of(in_half_precision, "job")) == JOBS
    assert not finished.figures["failures"]
    for row in finished.rows:
        assert row["seconds"] > 0
    assert "Largest difference" in finished.printed


def test_no_job_begins_when_the_minutes_are_over():
    options = Gpu(tiny=True, device="cpu", quiet=True)
    page = Page(options, end=0.0)
    page.measure("tiny", settings_of(options)[:1])
    figures, _ = page.result()
    assert figures["rows"] == figures["failures"] == []
