"""The benchmark of growth at small sizes."""

from itertools import product

import pytest

from tests.benchmarks.support import rows_by, rows_with, run

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
    for row in rows:
        assert row["seconds"] > 0
    assert "Against the number of classes" in finished.printed

    of_classes = rows_with(rows, against="classes")
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
    of_forward = rows_by(rows_with(of_classes, name="forward pass"), "size")
    assert [row["forward_passes"] for row in of_forward.values()] == [1, 1, 1]
    for row in of_classes:
        # All are told in forward passes of the same number of classes.
        forward = of_forward[row["size"],]
        seconds = row["forward_passes"] * forward["seconds"]
        assert row["seconds"] == pytest.approx(seconds)

    of_lengths = rows_by(rows_with(rows, against="tokens of a text"), "name", "size")
    series = []
    for name in ("training step", "fit", "prediction"):
        series += [name, f"{name}, checkpointed"]
    assert set(of_lengths) == set(product(series, (8, 16)))

    of_processes = rows_with(rows, against="processes")
    assert [row["size"] for row in of_processes] == [1, 2]
    for row in of_processes:
        assert row["in_bare_loops"] > 0
    assert "time_exponent" in of_processes[-1]

    of_widths = rows_with(rows, against="width")
    assert [row["size"] for row in of_widths] == [16, 32] * 2
    for row in of_widths:
        assert row["ratio"] == pytest.approx(row["seconds"] / row["seconds_without"])


def test_a_series_without_sizes_is_left_out(tmp_path, capsys):
    small = SMALL | {"classes": [], "lengths": [8], "processes": [], "widths": []}
    finished = run(capsys, tmp_path, "scale --quiet", **small)
    assert {row["against"] for row in finished.figures["rows"]} == {"tokens of a text"}
