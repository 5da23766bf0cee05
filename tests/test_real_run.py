"""Tuning on a real run: a pretrained encoder, fine-tuned on real text until it is too sure."""

import laplace
import pytest

from benchmarks.__main__ import build_parser
from benchmarks.preparation import prepare


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A fitted posterior and validation statistics."""
    options = {
        "--output": tmp_path_factory.mktemp("results"),
        "--train-examples": 60,
        "--validation-examples": 100,
        "--test-examples": 5,
        "--shifted-examples": 1,
        "--files-per-library": 60,
        "--epochs": 15,
    }
    arguments = [str(part) for option in options.items() for part in option]
    prepared = prepare(build_parser().parse_args([*arguments, "--quiet"]))
    la = laplace.Laplace(prepared.model, "classification", "lora", "lowrank_kron")
    la.fit(prepared.loader(prepared.train, 16))
    return la, la.predictive_statistics(prepared.loader(prepared.validation, 16))


@pytest.mark.parametrize("structure", ["scalar", "layerwise"])
def test_the_validation_loss_falls_along_the_descent(run, structure):
    la, statistics = run
    history = la.optimize_prior_precision(
        method="val_gd", val_loader=statistics, prior_structure=structure
    )
    loss = history.objective
    assert (loss[1:] < loss[0]).all()
    assert (loss.diff() < 0.02).all()  # noise of minibatches of four, nats
    assert loss[-1] < loss[0] - 0.1


def test_the_evidence_rises_until_it_is_steady(run):
    la, _ = run
    history = la.optimize_prior_precision(prior_structure="layerwise")
    assert len(history.step) < 1000
    assert history.objective[-11:].max() - history.objective[-11:].min() < 1e-3
    assert history.objective[-1] == pytest.approx(history.objective.max().item(), abs=1e-2)
