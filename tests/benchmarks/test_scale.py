"""The benchmark of growth at small sizes."""

from tests.benchmarks.support import run

SMALL = {
    "device": "cpu",
    "hidden_size": 16,
    "layers": 1,
    "batches": 1,
    "repetitions": 1,
    "classes": [2, 4],
    "lengths": [8],
    "processes": [1, 2],
}


def test_every_series_at_small_sizes(tmp_path, capsys):
    finished = run(capsys, tmp_path, "scale --quiet", **SMALL)
    rows = finished.figures["rows"]
    assert {row["against"] for row in rows} == {"classes", "processes", "tokens of a text"}
    assert all(row["seconds"] > 0 for row in rows)
    of_classes = [row for row in rows if row["against"] == "classes"]
    assert [row["name"] for row in of_classes] == ["fit", "predict"] * 2
    assert all(row["in_bare_loops"] > 0 for row in of_classes)
    ends = [row for row in rows if row["against"] == "processes"]
    assert [row["size"] for row in ends] == [1, 2]
    assert "time_exponent" in ends[-1]
    assert "Against the number of classes" in finished.printed
