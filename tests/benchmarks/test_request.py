"""The benchmark of single texts, with few requests."""

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
        assert len(of_model) == 8
        assert of_model[-1]["epochs"] == of_model[-1]["ms"] / of_model[-2]["ms"]
        assert of_model[0]["forwards"] == 1
        assert all(row["ms"] > 0 for row in of_model)
