"""The experiment that compares some contrasts with all, at its smallest."""

import pytest

from benchmarks.experiments.contrasts import BROADER
from tests.benchmarks.support import run, values_of


@pytest.fixture
def experiment(intents, tmp_path):
    """Runs on made-up intents, with a tiny encoder."""

    def measure(n_intents):
        finished = run(
            tmp_path / f"results of {n_intents}",
            "contrasts --quiet",
            task="clinc150",
            data=intents(n_intents),
            train_examples=4 * n_intents,
            test_examples=2 * n_intents,
            steps=3,
            checkpoints=1,
            cache=tmp_path / "cache",
        )
        of_model, *rows = finished.rows
        assert of_model["name"] == "MAP"
        return rows[::2], rows[1::2]

    return measure


def test_some_contrasts_stand_beside_all_under_the_chosen_and_broader_posteriors(
    experiment,
):
    of_all, of_some = experiment(n_intents=12)
    assert values_of(of_all, "broader") == list(BROADER)
    chosen = of_all[0]["prior_precision"]
    for exact, some in zip(of_all, of_some, strict=True):
        undone = exact["prior_precision"] * exact["broader"]
        assert undone == pytest.approx(chosen)
        # Of twelve classes.
        assert exact["contrasts"] == 11
        assert 1 <= some["contrasts"] <= 8
        difference = some["nll"] - exact["nll"]
        assert difference == pytest.approx(some["nll_beside_all"])
    assert of_some[-1]["largest_difference"] > 0


def test_few_classes_are_all_compared(experiment):
    of_all, of_some = experiment(n_intents=4)
    for exact, some in zip(of_all, of_some, strict=True):
        # Of four classes.
        assert exact["contrasts"] == 3
        assert some["contrasts"] == 3
        assert some["largest_difference"] == 0
        assert some["nll_beside_all"] == 0
