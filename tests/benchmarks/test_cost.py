"""The experiment on costs at its smallest."""

from itertools import product

import pytest
import torch
from torch.testing import assert_close

from benchmarks.methods import COSTS, METHODS, posterior
from benchmarks.random_models import Shape, random_llama, random_loader
from tests.benchmarks.support import probabilities_of, rows_by, run


@pytest.mark.usefixtures("in_this_process")
def test_the_benchmark_writes_table_and_figures(tmp_path):
    keys = ["bare", "lowrank_kron", "stock_kron"]
    finished = run(
        tmp_path / "results",
        "cost --hidden-sizes 32 --layers 1 --dtypes float32 --batch-size 2 --batches 1 "
        "--length 6 --classes 3 --repetitions 2 --prediction-batch-sizes 1 2",
        contestants=keys,
    )
    figures = finished.figures
    assert not figures["failures"]
    rows = rows_by(figures["measurements"], "contestant", "phase")
    phases = ["fit", "predict 1", "predict 2"]
    learnt = ["amortized 1", "amortized 2"]
    # The stock classes learn no variances.
    expected = {*product(keys, phases), *product(["bare", "lowrank_kron"], learnt)}
    assert set(rows) == expected
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
    for series in figures["growth"]:
        assert series["name"] in finished.printed
    for key in keys:
        assert f"| {METHODS[key].title} " in finished.printed


@pytest.mark.parametrize("key", [method.key for method in COSTS])
def test_every_rival_predicts_a_distribution_broader_than_the_models(key):
    shape = Shape(32, 2, 40, heads=1, vocabulary=50, classes=3, batch_size=2, length=6)
    (batch,) = random_loader(shape, 1, "cpu", seed=1, batch_size=5)
    model = random_llama(shape, "cpu", 0)
    expected = probabilities_of(model, [batch])
    la = posterior(key).build(model)
    la.fit(random_loader(shape, 2, "cpu", seed=0))
    probabilities = la(batch, pred_type="glm", link_approx="probit").detach()
    if key == "bare":
        assert_close(probabilities, expected)
        return
    assert_close(probabilities.sum(-1), torch.ones(5))
    # It is another distribution, if little broader.
    assert not torch.allclose(probabilities, expected, rtol=1e-6, atol=0)
    assert (probabilities.amax(-1) <= expected.amax(-1) + 1e-6).all()
