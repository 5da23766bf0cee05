"""The experiment on rivals at its smallest."""

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


def test_the_benchmark_measures_every_method(tmp_path, choices):
    options = choices | {"steps": 3, "checkpoints": 2}
    finished = run(tmp_path / "results", "calibration", **options)
    rows = rows_by(finished.figures["methods"], "method", "prior", "link")
    assert set(rows) == set(expected_rows())
    assert rows["map", "", ""]["forward_passes"] == 1
    for row in rows.values():
        assert 0 < row["nll"] < 50
        assert row["fit_seconds"] > 0
        assert row["trainings"] is None
        if row["method"] in LOW_RANK:
            assert row["regret"] >= 0  # the grid of factors has 1 in it
        else:
            assert row["regret"] is None
    assert "Training" in finished.progress
