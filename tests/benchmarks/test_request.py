"""The benchmark of single texts, with few requests."""

import pytest

from tests.benchmarks.support import rows_with, run, values_of


def test_every_kind_of_request(tmp_path):
    finished = run(
        tmp_path, "request --quiet", device="cpu", classes=[3], texts=6, requests=1
    )
    rows = finished.rows
    models = set(values_of(rows, "model"))
    assert models == {"MiniLM, 3 classes", "32 layers of width 16"}
    for model in models:
        of_model = rows_with(rows, model=model)
        assert len(of_model) == 10
        *requests, bare, learnt, epoch, fit = of_model
        assert bare["throughput"] > 0
        assert learnt["throughput"] > 0
        assert fit["epochs"] == pytest.approx(fit["ms"] / epoch["ms"])
        assert all(row["forwards"] > 0 for row in requests)
        assert all(row["ms"] > 0 for row in [*requests, epoch, fit])
