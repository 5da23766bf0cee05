"""The experiment that predicts numbers, at its smallest."""

import math
from itertools import product

import pytest

from benchmarks.experiments.molecules import read
from tests.benchmarks.support import parsed, rows_by, run, write_molecules

SEEDS = (0, 1)
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
    folder = tmp_path / "data"
    chains = []
    for number in range(40):
        n_carbon = number % 7 + 1
        n_nitrogen = number // 7
        chain = n_carbon * "C" + n_nitrogen * "N"
        chains.append(chain)
    write_molecules([*chains, chains[0]], folder)
    return folder


@pytest.fixture
def options(data):
    """Options by which all molecules are drawn."""
    return parsed(
        "molecules",
        data=data,
        train_examples=20,
        test_examples=100,
    )


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
    texts = {example.text for example in everything}
    assert len(texts) == 40
    for example in everything:
        wavelength = example.label * unit.std + unit.mean
        assert wavelength == pytest.approx(300 + 5 * len(example.text))
    other, _ = read(options, 4)
    assert other.train != task.train


def test_more_training_molecules_than_there_are_are_refused(data):
    # None would be left to test on.
    options = parsed("molecules", data=data, train_examples=40)
    with pytest.raises(SystemExit, match="photoswitches has 40 molecules"):
        read(options, 0)


def test_molecules_without_a_folder_say_what_to_give():
    options = parsed("molecules")
    with pytest.raises(SystemExit, match="give --data FOLDER"):
        read(options, 0)


def test_every_method_is_measured_for_each_seed(
    data,
    tmp_path,
    encoder,
    monkeypatch,
):
    monkeypatch.setattr(
        "benchmarks.experiments.molecules.encoder_folder",
        lambda: encoder,
    )
    finished = run(
        tmp_path / "results",
        "molecules --quiet",
        data=data,
        train_examples=20,
        test_examples=12,
        steps=3,
        seeds=SEEDS,
        cache=tmp_path / "cache",
    )
    rows = rows_by(finished.rows, "seed", "name")
    assert list(rows) == list(product(SEEDS, NAMES))
    for seed in SEEDS:
        of_seed = [rows[seed, name] for name in NAMES]
        of_mean, of_model, *posteriors, _ = of_seed
        assert of_mean["total_std"] == 1
        # By its noise of standard deviation 1 alone, the NLL is that of a standard
        # normal.
        mean_square = of_mean["rmse"] ** 2
        nll = (math.log(2 * math.pi) + mean_square) / 2
        assert of_mean["nll"] == pytest.approx(nll, rel=1e-5)
        assert of_model["epistemic_std"] == 0
        for row in posteriors:
            assert row["rmse"] == pytest.approx(of_model["rmse"], rel=1e-5)
            assert row["total_std"] > row["epistemic_std"] > 0
    for name in NAMES:
        assert name in finished.printed
    assert "±" in finished.printed
