"""The experiment on costs at its smallest."""

from itertools import product

import pytest

from benchmarks.methods import COSTS
from tests.benchmarks.support import rows_by, run


@pytest.mark.usefixtures("in_this_process")
def test_the_benchmark_measures_every_rival(tmp_path):
    command = (
        "cost --hidden-sizes 32 --layers 1 --dtypes float32 --batch-size 2 --batches 1 "
        "--length 6 --classes 3 --repetitions 2 --prediction-batch-sizes 1 2"
    )
    figures = run(command, tmp_path)
    assert not figures["failures"]
    rows = rows_by(figures["measurements"], "contestant", "phase")
    keys = [method.key for method in COSTS]
    # The paper's settings and the stock classes learn no variances.
    learning = product(["bare", "lowrank_kron"], ["amortized 1", "amortized 2"])
    assert set(rows) == {*product(keys, ["fit", "predict 1", "predict 2"]), *learning}
    for row in rows.values():
        assert 0 < row["minimum"] <= row["median"] <= row["maximum"]
        assert row["repetitions"] == len(row["seconds"]) == 2
        assert row["in_bare_loops"] > 0
    assert rows["bare", "fit"]["in_bare_loops"] == 1
    # Two dense factors of each of lora_A and lora_B, of q and of v, 32 and 8 wide, in
    # numbers of four bytes.
    kept = rows["stock_kron", "fit"]["posterior_megabytes"]
    assert kept == 4 * 4 * (32**2 + 8**2) / 1e6
    assert 0 < rows["lowrank_kron", "fit"]["posterior_megabytes"] < 0.02
