"""The benchmark of growth at small sizes."""

from itertools import product

import pytest

from tests.benchmarks.support import rows_by, rows_with, run, values_of

SMALL = (
    "scale --quiet --device cpu --hidden-size 16 --layers 1 --batches 2 "
    "--repetitions 1 --widths 16"
)


@pytest.mark.usefixtures("in_this_process")
def test_every_series_at_small_sizes(tmp_path):
    sizes = " --classes 2 30 --lengths 8 16 --processes 1"
    finished = run(tmp_path, SMALL + sizes)
    rows = finished.rows
    assert all(row["seconds"] > 0 for row in rows)
    assert "Against the number of classes" in finished.printed

    of_classes = rows_with(rows, against="classes")
    names = set(values_of(of_classes, "name"))
    assert len(of_classes) == 2 * len(names)
    assert {"fit", "search", "exact prediction", "prediction by contrasts"} < names
    of_forward = rows_with(of_classes, name="forward pass")
    assert values_of(of_forward, "forward_passes") == [1, 1]
    seconds_of = {row["size"]: row["seconds"] for row in of_forward}
    for row in of_classes:
        # All are told in forward passes of the same number of classes.
        seconds = row["forward_passes"] * seconds_of[row["size"]]
        assert row["seconds"] == pytest.approx(seconds)

    of_lengths = rows_with(rows, against="tokens of a text")
    names = ("training step", "fit", "prediction")
    series = [name + end for name in names for end in ("", ", checkpointed")]
    assert set(rows_by(of_lengths, "name", "size")) == set(product(series, (8, 16)))

    (of_one_process,) = rows_with(rows, against="processes")
    assert of_one_process["in_bare_loops"] > 0
    assert "time_exponent" in of_one_process

    (of_width,) = rows_with(rows, against="width")
    ratio = of_width["seconds"] / of_width["seconds_without"]
    assert of_width["ratio"] == pytest.approx(ratio)
