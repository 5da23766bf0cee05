"""The benchmark of growth at small sizes."""

from itertools import product

import pytest

from tests.benchmarks.support import rows_by, rows_with, run


@pytest.mark.usefixtures("in_this_process")
def test_every_series_at_small_sizes(tmp_path):
    command = (
        "scale --quiet --device cpu --hidden-size 16 --layers 1 --batches 2 "
        "--repetitions 1 --widths 16 --classes 2 30 --lengths 8 16 --processes 1"
    )
    rows = run(command, tmp_path)["rows"]
    assert all(row["seconds"] > 0 for row in rows)

    of_classes = rows_by(rows_with(rows, against="classes"), "name", "size")
    names = {"fit", "search", "exact prediction", "prediction by contrasts"}
    assert of_classes.keys() > set(product(names, (2, 30)))
    for (_, size), row in of_classes.items():
        # All are told in forward passes of the same number of classes.
        seconds = row["forward_passes"] * of_classes["forward pass", size]["seconds"]
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
