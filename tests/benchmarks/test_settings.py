"""The experiment that chooses settings of rivals, at its smallest."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.experiments.settings import TRAINED, text_of
from benchmarks.methods.settings import SETTINGS
from tests.benchmarks.support import run, values_of


@pytest.fixture
def settings_of(tmp_path, tiny_models):
    """Runs the experiment on the settings of some rivals."""

    def measure(*rivals):
        return run(
            tmp_path / "results",
            "settings",
            rivals=rivals,
            task="choices",
            model=tiny_models[True],
            train_examples=15,
            test_examples=4,
            shifted_examples=4,
            files_per_library=30,
            steps=2,
            checkpoints=1,
            cache=tmp_path / "cache",
        )

    return measure


def test_every_setting_trains_and_predicts_what_is_held_out(settings_of):
    finished = settings_of("ivon")
    found = values_of(finished.rows, "settings")
    recipes = [recipe.name for recipe in SETTINGS["ivon"].recipes]
    assert found == [TRAINED, *recipes]
    # Trainings are kept by their names.
    assert len(set(found)) == len(found)


def test_a_rival_without_settings_is_named(settings_of):
    with pytest.raises(SystemExit, match="No settings of 'mc_dropout'"):
        settings_of("mc_dropout")


def measured(rival, settings, accuracy, nll, seed=0):
    """Make a row of the experiment."""
    return {
        "seed": seed,
        "rival": rival,
        "settings": settings,
        "accuracy": accuracy,
        "nll": nll,
        "ece": 0.1,
    }


def test_the_settings_chosen_have_the_least_nll_of_those_that_are_accurate():
    pretrained: Any = SimpleNamespace(description={"name": "made up", "train": 100})
    rows = [
        measured(TRAINED, TRAINED, accuracy=0.5, nll=2.0),
        measured("ivon", "hardly trained", accuracy=0.3, nll=1.3),
        measured("ivon", "good", accuracy=0.49, nll=1.6),
        measured("ivon", "worse", accuracy=0.6, nll=1.7),
        measured("blob", "coin toss", accuracy=0.48, nll=1.0),
    ]
    *_, of_ivon, of_blob = text_of(pretrained, rows)
    assert of_ivon == "ivon: good is chosen, by NLL."
    assert of_blob == "blob fails: its settings lose 2 points or more."
    # Means of seeds decide.
    rows += [
        measured(TRAINED, TRAINED, accuracy=0.5, nll=2.0, seed=1),
        measured("ivon", "good", accuracy=0.49, nll=2.0, seed=1),
        measured("ivon", "worse", accuracy=0.5, nll=1.7, seed=1),
    ]
    assert "ivon: worse is chosen, by NLL." in text_of(pretrained, rows)
