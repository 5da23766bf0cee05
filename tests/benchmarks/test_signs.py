"""The experiment on how many passes a fit needs, at its smallest."""

import pytest

from benchmarks.experiments import signs
from tests.benchmarks.support import rows_with, run, values_of


@pytest.fixture
def experiment(intents, tmp_path, monkeypatch):
    """Runs on made-up intents, with a tiny encoder."""
    # Hardly trained, its curvature is small.
    monkeypatch.setattr(signs, "BROAD", 1e-9)

    def measure(n_intents):
        finished = run(
            tmp_path / f"results of {n_intents}",
            "signs --quiet",
            task="clinc150",
            data=intents(n_intents),
            train_examples=4 * n_intents,
            test_examples=2 * n_intents,
            steps=3,
            checkpoints=1,
            passes=[1, 3],
            draws=2,
            cache=tmp_path / "cache",
        )
        return finished.rows

    return measure


def test_fits_by_draws_stand_beside_the_exact_one(experiment):
    exact, *drawn = experiment(n_intents=5)
    assert exact["name"] == "exact"
    assert exact["passes"] == 4
    assert exact["covariance"] == exact["probability_broad"] == 0
    assert values_of(drawn, "name") == 4 * ["labels"] + 4 * ["signs"]
    assert values_of(drawn, "passes") == 2 * [1, 1, 3, 3]
    assert all(row["covariance_broad"] > 0 for row in drawn)


def test_one_sign_is_exact_where_two_classes_have_one_column(experiment):
    exact, *drawn = experiment(n_intents=2)
    for row in rows_with(drawn, name="signs"):
        assert row["covariance_broad"] < 1e-2
        assert row["nll"] == pytest.approx(exact["nll"], abs=1e-3)
