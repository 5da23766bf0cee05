"""The benchmark of growth at small sizes."""

from itertools import product

import pytest

from tests.benchmarks.support import rows_by, rows_with, run, values_of

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


def test_every_series_at_small_sizes(tmp_path):
    finished = run(tmp_path, "scale --quiet", **SMALL)
    rows = finished.rows
    for row in rows:
        assert row["seconds"] > 0
    assert "Against the number of classes" in finished.printed

    of_classes = rows_with(rows, against="classes")
    names = set(values_of(of_classes, "name"))
    assert len(of_classes) == 3 * len(names)
    expected = {
        "forward pass",
        "fit",
        "search",
        "exact prediction",
        "prediction by contrasts",
    }
    assert expected < names
    of_forward = rows_with(of_classes, name="forward pass")
    assert values_of(of_forward, "forward_passes") == [1, 1, 1]
    seconds_of = {row["size"]: row["seconds"] for row in of_forward}
    for row in of_classes:
        # All are told in forward passes of the same number of classes.
        of_pass = seconds_of[row["size"]]
        seconds = row["forward_passes"] * of_pass
        assert row["seconds"] == pytest.approx(seconds)

    of_lengths = rows_with(rows, against="tokens of a text")
    series = []
    for name in ("training step", "fit", "prediction"):
        series += [name, f"{name}, checkpointed"]
    found = rows_by(of_lengths, "name", "size")
    assert set(found) == set(product(series, (8, 16)))

    of_processes = rows_with(rows, against="processes")
    assert values_of(of_processes, "size") == [1, 2]
    for row in of_processes:
        assert row["in_bare_loops"] > 0
    assert "time_exponent" in of_processes[-1]

    of_widths = rows_with(rows, against="width")
    assert values_of(of_widths, "size") == [16, 32]
    for row in of_widths:
        ratio = row["seconds"] / row["seconds_without"]
        assert row["ratio"] == pytest.approx(ratio)


def test_a_series_without_sizes_is_left_out(tmp_path):
    of_lengths_alone = {
        "classes": [],
        "lengths": [8],
        "processes": [],
        "widths": [],
    }
    small = SMALL | of_lengths_alone
    finished = run(tmp_path, "scale --quiet", **small)
    series = values_of(finished.rows, "against")
    assert set(series) == {"tokens of a text"}
