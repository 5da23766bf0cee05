"""The one fine-tuning, its cache, and methods on what it leaves, with tiny models."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical

import benchmarks.fine_tuning as fine_tuning_module
from benchmarks.fine_tuning import TEST, TRAIN, fine_tune
from benchmarks.methods import METHODS, posterior, priors
from benchmarks.methods.method import fit_temperature, labels_of
from benchmarks.methods.priors import GRID, by_tfb_rule
from benchmarks.tasks.paper import PAPER_TASKS
from laplace_lora_ext import Moments
from tests.benchmarks.support import (
    assert_sum_to_1,
    predicted,
    trained,
    training_texts,
)
from tests.support.posteriors import generator

# --- tasks of the paper ---------------------------------------------------------------

# One of each kind: choices' letters, true or false, one sentence, and pairs.
KINDS = ["arc_easy", "boolq", "cola", "boolq_pairs"]


@pytest.mark.parametrize("name", KINDS)
def test_a_task_has_the_papers_settings_but_for_those_asked_for(name, prepared):
    settings = prepared(name).hyperparameters
    paper = PAPER_TASKS[name].hyperparameters
    assert settings.rank == paper.rank
    assert settings.learning_rate == paper.learning_rate
    assert settings.target_modules == paper.target_modules
    # What the fixture has asked for goes before the paper's.
    assert settings.steps == 2
    assert settings.batch_size == 2


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_task_of_the_paper_runs_on_a_tiny_model(name, prepared):
    pretrained = prepared(name)
    texts = training_texts(pretrained)
    model = trained(pretrained)
    la = posterior("lowrank_kron").build(model)
    la.fit(texts)
    labels = labels_of(pretrained.data[TRAIN])

    of_map = METHODS["map"].fit(model, texts)
    found = [predicted(of_map, texts)]
    for prediction in priors.predictions(la, None, {TEST: texts}, labels):
        of_prior = prediction.probabilities[TEST]
        found.append(of_prior)

    n_texts = len(pretrained.task.train)
    n_classes = len(PAPER_TASKS[name].classes)
    for probabilities in found:
        assert probabilities.shape == (n_texts, n_classes)
        assert_sum_to_1(probabilities)


# --- TFB's rule -----------------------------------------------------------------------

N_TEXTS = 200


class VarianceOfThePrior:
    """A posterior with the variance of its prior alone, that notes what is tried."""

    def __init__(self) -> None:
        self.f_mu = torch.randn(N_TEXTS, 3, generator=generator(1))
        self.tried: list[Tensor] = []

    def moments(self, prior_precision: Tensor) -> Moments:
        self.tried.append(prior_precision)
        variance = torch.eye(3) / prior_precision
        f_var = variance.expand(N_TEXTS, 3, 3)
        return Moments(self.f_mu, f_var)

    def n_changed(self, prior_precision: Tensor) -> int:
        """Count the texts whose class ten draws of the logits change."""
        noise = torch.randn((10, N_TEXTS, 3), generator=generator(0))
        draws = self.f_mu + noise / prior_precision.sqrt()
        p = draws.softmax(-1).mean(0)
        is_changed = p.argmax(-1) != self.f_mu.argmax(-1)
        return int(is_changed.sum())


def test_tfbs_rule_takes_the_smallest_prior_precision_that_changes_few_classes():
    la = VarianceOfThePrior()
    chosen = by_tfb_rule(None, la)

    tried = torch.cat(la.tried)
    first_of_grid = GRID[: len(tried)]
    assert torch.equal(tried, first_of_grid)
    assert torch.equal(chosen, la.tried[-1])

    *before, last = map(la.n_changed, la.tried)
    most = 2  # 1 % of the texts
    assert last <= most
    assert min(before) > most


# --- ensembles ------------------------------------------------------------------------


@pytest.fixture
def of_seeds(prepared):
    """Three models with four checkpoints, whose seeds are as far apart as members'."""
    pretrained = prepared("mrpc", steps=4, checkpoints=4)
    return [trained(pretrained, seed) for seed in (0, 1000, 2000)]


@pytest.fixture
def predicted_by(prepared):
    """Predicts by one method's members for a model."""
    texts = training_texts(prepared("mrpc"))

    def predict(key, model):
        members = METHODS[key].fit(model, texts)
        return predicted(members, texts)

    return predict


@pytest.fixture
def mean_of(predicted_by):
    """Averages models' probabilities."""

    def average(models):
        each = [predicted_by("map", model) for model in models]
        return torch.stack(each).mean(0)

    return average


def test_ensembles_average_probabilities(of_seeds, predicted_by, mean_of):
    first, second, _ = of_seeds
    of_first = predicted_by("map", first)
    of_second = predicted_by("map", second)
    assert not torch.equal(of_first, of_second)
    found = predicted_by("deep_ensemble", first)
    expected = mean_of(of_seeds)
    assert torch.allclose(found, expected)


def test_an_ensemble_of_an_earlier_checkpoint_has_the_others_at_the_same_step(
    of_seeds,
    predicted_by,
    mean_of,
):
    first, *_ = of_seeds
    assert list(first.checkpoints) == [1, 2, 3, 4]
    early = [model.at(3) for model in of_seeds]
    assert list(early[0].checkpoints) == [1, 2, 3]
    expected = mean_of(early)
    found = predicted_by("deep_ensemble", early[0])
    assert torch.allclose(found, expected)


def test_an_ensemble_of_checkpoints_has_the_last_three(of_seeds, predicted_by):
    model, *_ = of_seeds
    # The checkpoints share one model: each is predicted by before the next is set.
    of_steps = []
    for step in (2, 3, 4):
        of_step = predicted_by("map", model.at(step))
        of_steps.append(of_step)
    expected = torch.stack(of_steps).mean(0)
    found = predicted_by("checkpoint_ensemble", model)
    assert torch.allclose(found, expected)


def test_dropout_while_predicting_leaves_the_model_in_evaluation(
    of_seeds,
    predicted_by,
):
    model, *_ = of_seeds
    of_map = predicted_by("map", model)
    of_dropout = predicted_by("mc_dropout", model)
    assert not torch.allclose(of_dropout, of_map, atol=1e-6)
    assert not model.model.training


# --- the cache ------------------------------------------------------------------------


@pytest.fixture
def trainings(monkeypatch):
    """A list that has an entry for each training that is not read from the cache."""
    done = []
    original = fine_tuning_module.train

    def counted(*args, **kwargs):
        done.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(fine_tuning_module, "train", counted)
    return done


def test_a_training_is_read_from_the_cache(prepared, trainings):
    pretrained = prepared("mrpc")
    texts = training_texts(pretrained)
    model = trained(pretrained)
    expected = model.logits(texts)
    assert len(trainings) == 1
    again = trained(pretrained)
    found = again.logits(texts)
    assert torch.equal(found, expected)
    assert list(again.checkpoints) == [1, 2]
    assert len(trainings) == 1


def test_another_seed_other_texts_and_other_settings_are_other_trainings(
    prepared,
    trainings,
):
    pretrained = prepared("mrpc")
    train = pretrained.data[TRAIN]
    fine_tune(pretrained, train, seed=0)
    assert len(trainings) == 1
    fine_tune(pretrained, train, seed=1)
    assert len(trainings) == 2
    fine_tune(pretrained, train[1:], seed=0)
    assert len(trainings) == 3
    settings = replace(pretrained.hyperparameters, learning_rate=1e-3)
    other = replace(pretrained, hyperparameters=settings)
    fine_tune(other, train, seed=0)
    assert len(trainings) == 4


# --- temperatures ---------------------------------------------------------------------


@pytest.fixture
def logits():
    torch.manual_seed(0)
    return 3 * torch.randn(20000, 4)


@pytest.fixture
def labels(logits):
    """Labels that are drawn at a temperature of 2.5."""
    classes = Categorical(logits=logits / 2.5)
    return classes.sample()


def test_a_temperature_is_recovered(logits, labels):
    temperature = fit_temperature(logits, labels)
    assert temperature == pytest.approx(2.5, rel=0.05)


def test_a_temperature_is_fitted_to_the_mean_of_members(logits, labels):
    alike = torch.stack([logits, logits])
    temperature = fit_temperature(alike, labels)
    assert temperature == pytest.approx(2.5, rel=0.05)
    # Not to each: opposite logits cancel at any temperature.
    noise = torch.randn(logits.shape)
    other = logits + 3 * noise
    apart = torch.stack([logits, other])
    of_both = fit_temperature(apart, labels)
    of_other = fit_temperature(other, labels)
    assert of_both < of_other
