"""The experiment that predicts numbers, at its smallest."""

import math
from itertools import product

import pytest

from benchmarks.experiments.molecules import read
from tests.benchmarks.support import parsed, run, write_molecules

NAMES = [
    "Mean of the training targets",
    "Trained model, constant noise",
    "lowrank_kron",
    "The same with the head",
    "Gaussian process on frozen features",
]


@pytest.fixture
def data(tmp_path):
    """A folder of made-up molecules; the last row repeats the first molecule."""
    chains = ["C" * (number % 7 + 1) + "N" * (number // 7) for number in range(40)]
    write_molecules([*chains, chains[0]], tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def options(data):
    """Options by which all molecules are drawn."""
    return parsed("molecules", data=data, train_examples=20, test_examples=100)


def test_training_targets_have_mean_0_and_deviation_1(options):
    task, _ = read(options, 3)
    targets = [example.label for example in task.train]
    assert len(targets) == 20
    assert sum(targets) == pytest.approx(0, abs=1e-9)
    # By the divisor that a sample's variance has.
    assert sum(target**2 for target in targets) == pytest.approx(19)


def test_no_molecule_is_drawn_twice_and_each_has_its_own_target(options):
    task, unit = read(options, 3)
    everything = [*task.train, *task.test]
    assert len(everything) == 40
    assert len({example.text for example in everything}) == 40
    for example in everything:
        wavelength = example.label * unit.std + unit.mean
        assert wavelength == pytest.approx(300 + 5 * len(example.text))
    other, _ = read(options, 4)
    assert other.train != task.train


def test_more_training_molecules_than_there_are_are_refused(data):
    options = parsed("molecules", data=data, train_examples=40)
    with pytest.raises(SystemExit, match="photoswitches has 40 molecules"):
        read(options, 0)
    with pytest.raises(SystemExit, match="give --data FOLDER"):
        read(parsed("molecules"), 0)


def test_every_method_is_measured_for_each_seed(
    data,
    tmp_path,
    capsys,
    encoder,
    monkeypatch,
):
    monkeypatch.setattr(
        "benchmarks.experiments.molecules.encoder_folder",
        lambda: encoder,
    )
    finished = run(
        capsys,
        tmp_path / "results",
        "molecules --quiet",
        data=data,
        train_examples=20,
        test_examples=12,
        steps=3,
        seeds=(0, 1),
        cache=tmp_path / "cache",
    )
    rows = finished.figures["rows"]
    found = [(row["seed"], row["name"]) for row in rows]
    assert found == list(product((0, 1), NAMES))
    for of_seed in (rows[:5], rows[5:]):
        of_mean, of_model, *posteriors, _ = of_seed
        assert of_mean["total_std"] == 1
        # By its noise of standard deviation 1 alone, the NLL is that of a standard
        # normal.
        nll = (math.log(2 * math.pi) + of_mean["rmse"] ** 2) / 2
        assert of_mean["nll"] == pytest.approx(nll, rel=1e-5)
        assert of_model["epistemic_std"] == 0
        for row in posteriors:
            assert row["rmse"] == pytest.approx(of_model["rmse"], rel=1e-5)
            assert row["total_std"] > row["epistemic_std"] > 0
    for name in NAMES:
        assert name in finished.printed
    assert "±" in finished.printed
