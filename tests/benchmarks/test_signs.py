"""The experiment on how many passes a fit needs, at its smallest."""

import pytest
import transformers

from benchmarks.experiments import signs
from tests.benchmarks.support import rows_with, run, values_of, write_intents


@pytest.fixture
def experiment(tiny_models, tmp_path, monkeypatch):
    """Runs on made-up intents, with a tiny encoder that has no head yet."""
    folder = tmp_path / "encoder"
    for part in (transformers.AutoModel, transformers.AutoTokenizer):
        part.from_pretrained(tiny_models[False]).save_pretrained(folder)
    monkeypatch.setattr("benchmarks.models.encoder_folder", lambda: folder)
    # Hardly trained, its curvature is small.
    monkeypatch.setattr(signs, "BROAD", 1e-9)

    def measure(n_intents):
        write_intents({"travel": "abcde"[:n_intents]}, 4, tmp_path)
        finished = run(
            tmp_path / "results",
            "signs --quiet --task clinc150 --steps 3 --checkpoints 1 --passes 1 3",
            data=tmp_path,
            train_examples=4 * n_intents,
            test_examples=2 * n_intents,
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
