"""The benchmark of growth at small sizes."""

import pytest

from tests.benchmarks.support import run

SMALL = {
    "device": "cpu",
    "hidden_size": 16,
    "layers": 1,
    "batches": 2,
    "repetitions": 1,
    "classes": [2, 4, 30],
    "lengths": [8, 16],
    "processes": [1, 2],
    "widths": [16, 32],
}


def test_every_series_at_small_sizes(tmp_path, capsys):
    finished = run(capsys, tmp_path, "scale --quiet", **SMALL)
    rows = finished.figures["rows"]
    assert all(row["seconds"] > 0 for row in rows)

    of_classes = [row for row in rows if row["against"] == "classes"]
    names = {row["name"] for row in of_classes}
    assert len(of_classes) == 3 * len(names)
    expected = {
        "forward pass",
        "fit",
        "search",
        "exact prediction",
        "prediction by contrasts",
    }
    assert expected < names
    forward = {row["size"]: row for row in of_classes if row["name"] == "forward pass"}
    assert [row["forward_passes"] for row in forward.values()] == [1, 1, 1]
    for row in of_classes:
        seconds = row["forward_passes"] * forward[row["size"]]["seconds"]
        assert row["seconds"] == pytest.approx(seconds)

    of_lengths = {
        (row["name"], row["size"])
        for row in rows
        if row["against"] == "tokens of a text"
    }
    assert of_lengths == {
        (name + way, size)
        for name in ("training step", "fit", "prediction")
        for way in ("", ", checkpointed")
        for size in (8, 16)
    }

    of_processes = [row for row in rows if row["against"] == "processes"]
    assert [row["size"] for row in of_processes] == [1, 2]
    assert all(row["in_bare_loops"] > 0 for row in of_processes)
    assert "time_exponent" in of_processes[-1]
    of_widths = [row for row in rows if row["against"] == "width"]
    assert [row["size"] for row in of_widths] == [16, 32] * 2
    for row in of_widths:
        assert row["ratio"] == pytest.approx(row["seconds"] / row["seconds_without"])
    assert "Against the number of classes" in finished.printed


def test_a_series_without_sizes_is_left_out(tmp_path, capsys):
    small = SMALL | {"classes": [], "lengths": [8], "processes": [], "widths": []}
    finished = run(capsys, tmp_path, "scale --quiet", **small)
    assert {row["against"] for row in finished.figures["rows"]} == {"tokens of a text"}
