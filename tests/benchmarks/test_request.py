"""The benchmark of single texts, with few requests."""

import pytest

from tests.benchmarks.support import rows_with, run


def test_every_kind_of_request(tmp_path, monkeypatch):
    for name, smaller in {"LAYERS": 2, "WARM_UP": 0, "FITS": 1}.items():
        monkeypatch.setattr(f"benchmarks.experiments.request.{name}", smaller)
    command = "request --quiet --device cpu --classes 3 --texts 6 --requests 1"
    rows = run(command, tmp_path)["rows"]
    for model in ("MiniLM, 3 classes", "2 layers of width 16"):
        of_model = rows_with(rows, model=model)
        assert len(of_model) == 10
        *requests, bare, learnt, epoch, fit = of_model
        assert bare["throughput"] > 0
        assert learnt["throughput"] > 0
        assert fit["epochs"] == pytest.approx(fit["ms"] / epoch["ms"])
        for row in requests:
            assert row["forwards"] > 0
            assert row["ms"] > 0
