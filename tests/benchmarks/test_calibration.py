"""The experiment on rivals at its smallest, and the text of several seeds."""

from benchmarks.methods import CALIBRATED, CURVATURES
from benchmarks.methods.priors import BY_TRAINING, LINKS
from tests.benchmarks.support import rows_by, run

LOW_RANK = ("last_layer", "lowrank_kron_paper", "lowrank_kron")


def expected_rows():
    """Name the method, the prior and the link of every row."""
    for method in CALIBRATED:
        if method not in CURVATURES:
            yield method.key, "", ""
            continue
        for prior in BY_TRAINING.values():
            if method.on_training or not prior.reads:
                for link in LINKS:
                    yield method.key, prior.key, link


def test_the_benchmark_measures_every_method(tmp_path, tiny_models):
    finished = run(
        tmp_path / "results",
        "calibration",
        task="choices",
        model=tiny_models[True],
        train_examples=10,
        test_examples=12,
        shifted_examples=8,
        files_per_library=30,
        steps=3,
        checkpoints=2,
        cache=tmp_path / "cache",
    )
    rows = rows_by(finished.figures["methods"], "method", "prior", "link")
    assert set(rows) == set(expected_rows())
    for row in rows.values():
        assert 0 < row["nll"] < 50
        if row["method"] in LOW_RANK:
            assert row["regret"] >= 0  # the grid of factors has 1 in it
        else:
            assert row["regret"] is None
    assert "Training" in finished.progress
