"""The experiment that chooses settings of rivals, at its smallest."""

import pytest

from benchmarks.experiments.settings import TRAINED
from benchmarks.methods.settings import SETTINGS
from tests.benchmarks.support import run


def small(tiny_models, tmp_path):
    return {
        "task": "choices",
        "model": tiny_models[True],
        "train_examples": 15,
        "test_examples": 4,
        "shifted_examples": 4,
        "files_per_library": 30,
        "steps": 2,
        "checkpoints": 1,
        "cache": tmp_path / "cache",
    }


def test_every_setting_trains_and_predicts_what_is_held_out(
    tmp_path, capsys, tiny_models
):
    finished = run(
        capsys,
        tmp_path / "results",
        "settings",
        rivals=["ivon"],
        **small(tiny_models, tmp_path),
    )
    names = [row["settings"] for row in finished.figures["rows"]]
    assert names == [TRAINED, *(recipe.name for recipe in SETTINGS["ivon"].recipes)]
    # Trainings are kept by their names.
    assert len(set(names)) == len(names)


def test_a_rival_without_settings_is_named(tmp_path, capsys, tiny_models):
    with pytest.raises(SystemExit, match="No settings of 'mc_dropout'"):
        run(
            capsys,
            tmp_path / "results",
            "settings",
            rivals=["mc_dropout"],
            **small(tiny_models, tmp_path),
        )
