"""The experiment on rivals at its smallest, and the text of several seeds."""

from types import SimpleNamespace

from benchmarks.experiments.calibration import CONTESTANTS, text_of
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


def test_tables_have_means_and_deviations_over_seeds():
    description = {"name": "t", "train": 1, "test": 1, "classes": ["a"], "shifted": {}}
    settings = SimpleNamespace(model="tiny")
    pretrained = SimpleNamespace(description=description, hyperparameters=settings)
    rows = [
        {"name": "m", "chosen_by": "evidence", "link": link, "seed": seed, "nll": nll}
        for seed, link, nll in ((0, "p", 1.0), (1, "p", 3.0), (1, "q", 2.0))
    ]
    words, table = text_of(pretrained, rows, ["nll"])
    assert "Seeds: 0, 1" in words
    # "q" has one seed alone, so that there is nothing to spread.
    assert [line.split("|")[-2].strip() for line in table.splitlines()[2:]] == [
        "2.000 ± 1.414",
        "2.000",
    ]
