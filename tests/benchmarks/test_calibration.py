"""The experiment on rivals at its smallest, and the text of several seeds."""

from benchmarks.experiments.calibration import CONTESTANTS
from benchmarks.methods import METHODS
from benchmarks.methods.method import Posterior
from benchmarks.methods.priors import BY_TRAINING, LINKS
from tests.benchmarks.support import run

LAPLACE = [key for key in CONTESTANTS if isinstance(METHODS[key], Posterior)]
SIZES = {"train_examples": 10, "test_examples": 12, "shifted_examples": 8}


def test_the_benchmark_measures_every_method(tmp_path, capsys, tiny_models):
    training = {"steps": 3, "checkpoints": 2, "files_per_library": 30, "cache": tmp_path / "cache"}
    options = {"task": "choices", "model": tiny_models[True], **SIZES, **training}
    figures, _, progress = run(capsys, tmp_path / "results", "calibration", **options)
    rows = {(row["method"], row["prior"], row["link"]): row for row in figures["methods"]}
    assert len(rows) == len(figures["methods"])
    points = {(key, "", "") for key in CONTESTANTS if key not in LAPLACE}
    assert rows.keys() == points | {
        (key, prior.key, link)
        for key in LAPLACE
        for prior in BY_TRAINING.values()
        if METHODS[key].on_training or not prior.reads
        for link in LINKS
    }
    for (key, *_), row in rows.items():
        assert 0 < row["nll"] < 50
        low_rank = key in ("last_layer", "lowrank_kron_paper", "lowrank_kron")
        assert (row["regret"] is not None) == low_rank
        assert not low_rank or row["regret"] >= 0  # the grid of factors has 1 in it
    assert "Training" in progress
