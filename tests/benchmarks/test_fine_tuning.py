"""The one fine-tuning, its cache, and methods on what it leaves, with tiny models."""

from dataclasses import replace

import pytest
import torch
from torch.distributions import Categorical
from torch.nn.functional import nll_loss

import benchmarks.fine_tuning as fine_tuning_module
from benchmarks.fine_tuning import TRAIN, fine_tune
from benchmarks.methods import METHODS
from benchmarks.methods.method import fit_temperature
from benchmarks.tasks.paper import PAPER_TASKS
from tests.benchmarks.support import predicted, trained, training_texts


def test_what_is_asked_for_goes_before_the_papers_settings(prepared):
    settings = prepared("--steps 2").hyperparameters
    paper = PAPER_TASKS["cola"].hyperparameters
    asked = {"steps": 2, "batch_size": 8, "learning_rate": 0.01}
    assert settings == replace(paper, model=settings.model, **asked)


# --- ensembles ------------------------------------------------------------------------


@pytest.fixture
def of_seeds(prepared):
    """Three models with four checkpoints, whose seeds are as far apart as members'."""
    pretrained = prepared("--steps 4")
    return [trained(pretrained, seed) for seed in (0, 1000, 2000)]


@pytest.fixture
def predicted_by(prepared):
    """Predicts by one method's members for a model."""
    texts = training_texts(prepared(""))
    return lambda key, model: predicted(METHODS[key].fit(model, texts), texts)


def test_ensembles_average_probabilities_of_the_same_step(of_seeds, predicted_by):
    # A model that was taken back to a checkpoint has the others at the same step.
    for step in (4, 3):
        models = [model.at(step) for model in of_seeds]
        assert list(models[0].checkpoints) == list(range(1, step + 1))
        of_each = torch.stack([predicted_by("map", model) for model in models])
        assert not torch.equal(of_each[0], of_each[1])
        found = predicted_by("deep_ensemble", models[0])
        assert torch.allclose(found, of_each.mean(0))


def test_checkpoints_are_averaged_and_dropout_leaves_the_model_in_evaluation(
    of_seeds, predicted_by
):
    model, *_ = of_seeds
    # The checkpoints share one model: each is predicted by before the next is set.
    of_steps = [predicted_by("map", model.at(step)) for step in (2, 3, 4)]
    found = predicted_by("checkpoint_ensemble", model)
    assert torch.allclose(found, torch.stack(of_steps).mean(0))
    of_map = predicted_by("map", model)
    assert not torch.allclose(predicted_by("mc_dropout", model), of_map, atol=1e-6)
    assert not model.model.training


# --- the cache ------------------------------------------------------------------------


def test_a_training_is_read_from_the_cache_if_all_is_the_same(
    prepared, tmp_path, monkeypatch
):
    pretrained = prepared("--steps 2")
    texts = training_texts(pretrained)
    expected = trained(pretrained).logits(texts)
    with monkeypatch.context() as patch:
        patch.delattr(fine_tuning_module, "train")
        again = trained(pretrained)
    assert torch.equal(again.logits(texts), expected)
    assert list(again.checkpoints) == [1, 2]
    # Another seed, other texts and other settings are other trainings.
    train = pretrained.data[TRAIN]
    fine_tune(pretrained, train, seed=1)
    fine_tune(pretrained, train[1:], seed=0)
    settings = replace(pretrained.hyperparameters, learning_rate=1e-3)
    fine_tune(replace(pretrained, hyperparameters=settings), train, seed=0)
    assert len(list(tmp_path.glob("cache/*.pt"))) == 4


# --- temperatures ---------------------------------------------------------------------


def test_a_temperature_is_recovered_and_fitted_to_the_mean_of_members():
    torch.manual_seed(0)
    logits = 3 * torch.randn(20000, 4)
    # Labels are drawn at a temperature of 2.5.
    labels = Categorical(logits=logits / 2.5).sample()
    assert fit_temperature(logits, labels) == pytest.approx(2.5, rel=0.05)
    # Not to each: the probabilities are averaged.
    members = torch.stack([logits, logits + 3 * torch.randn(logits.shape)])

    def nll(temperature: float) -> float:
        mean = (members / temperature).softmax(-1).mean(0)
        return nll_loss(mean.log(), labels).item()

    found = fit_temperature(members, labels)
    assert nll(found) < min(nll(0.95 * found), nll(1.05 * found))
