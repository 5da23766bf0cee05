"""Tuning on a real run: a pretrained encoder, fine-tuned on real text until it is too sure."""

import pytest

from benchmarks.fine_tuning import TEST, fine_tune, prepare
from benchmarks.methods import posterior
from tests.benchmarks.support import parsed


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A fitted posterior and validation statistics."""
    sizes = {"train_examples": 60, "test_examples": 100, "shifted_examples": 1, "steps": 60}
    files = {"files_per_library": 60, "cache": tmp_path_factory.mktemp("cache")}
    pretrained = prepare(parsed("stages --quiet", **sizes, **files), 0)
    model = fine_tune(pretrained, pretrained.data["train"], 0)
    la = posterior("lowrank_kron").build(model)
    la.fit(pretrained.loader("train"))
    return la, la.predictive_statistics(pretrained.loader(TEST))


@pytest.mark.parametrize("structure", ["scalar", "layerwise"])
def test_the_validation_loss_falls_along_the_descent(fitted, structure):
    la, statistics = fitted
    history = la.optimize_prior_precision(
        method="val_gd", val_loader=statistics, prior_structure=structure
    )
    loss = history.objective
    assert (loss[1:] < loss[0]).all()
    assert (loss.diff() < 0.02).all()  # noise of minibatches of four, nats
    assert loss[-1] < loss[0] - 0.1


def test_the_evidence_rises_until_it_is_steady(fitted):
    la, _ = fitted
    history = la.optimize_prior_precision(prior_structure="layerwise")
    assert len(history.step) < 1000
    assert history.objective[-11:].max() - history.objective[-11:].min() < 1e-3
    assert history.objective[-1] == pytest.approx(history.objective.max().item(), abs=1e-2)
