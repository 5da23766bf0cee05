"""The one fine-tuning, its cache, and methods on what it leaves, with tiny models."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import benchmarks.fine_tuning as fine_tuning_module
from benchmarks.fine_tuning import TEST, TRAIN, fine_tune
from benchmarks.methods import METHODS, posterior, priors
from benchmarks.methods.method import fit_temperature, labels_of
from benchmarks.methods.priors import GRID, by_tfb_rule
from benchmarks.tasks.paper import PAPER_TASKS
from laplace_lora_ext import Moments


@pytest.mark.parametrize("name", ["arc_easy", "boolq", "cola", "boolq_pairs"])
def test_every_kind_of_task_of_the_paper_runs_on_a_tiny_model(name, prepared):
    pretrained = prepared(name)
    paper = PAPER_TASKS[name].hyperparameters
    settings = pretrained.hyperparameters
    assert (settings.rank, settings.learning_rate) == (paper.rank, paper.learning_rate)
    assert settings.target_modules == paper.target_modules
    assert (settings.steps, settings.batch_size) == (2, 2)
    train = pretrained.data[TRAIN]
    model = fine_tune(pretrained, train, seed=0)
    loader = pretrained.loader(train, batch_size=8)
    loaders = {TEST: loader}
    of_map = METHODS["map"].fit(model, loader)
    predicted = [of_map.predict(loaders)[TEST]]
    la = posterior("lowrank_kron").build(model)
    la.fit(loader)
    for prediction in priors.predictions(la, None, loaders, labels_of(train)):
        predicted.append(prediction.probabilities[TEST])
    texts = len(pretrained.task.train)
    for probabilities in predicted:
        assert probabilities.shape == (texts, len(PAPER_TASKS[name].classes))
        assert torch.allclose(probabilities.sum(-1), torch.ones(texts), atol=1e-4)


def test_tfbs_rule_takes_the_smallest_prior_precision_that_changes_few_classes():
    torch.manual_seed(0)
    f_mu = torch.randn(200, 3)
    tried = []

    def moments(value):
        tried.append(value)
        return Moments(f_mu, torch.eye(3).expand(200, 3, 3) / value)

    chosen = by_tfb_rule(None, SimpleNamespace(moments=moments))
    assert torch.equal(torch.cat(tried), GRID[: len(tried)])
    assert torch.equal(chosen, tried[-1])
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn((10, 200, 3), generator=generator)
    changed = []
    for value in tried:
        draws = f_mu + noise / value.sqrt()
        mean = draws.softmax(-1).mean(0)
        is_changed = mean.argmax(-1) != f_mu.argmax(-1)
        changed.append(int(is_changed.sum()))
    assert changed[-1] <= 2 < min(changed[:-1])  # 2 are 1 % of the texts


def test_ensembles_average_probabilities(prepared):
    pretrained = prepared("mrpc", steps=4, checkpoints=4)
    train = pretrained.data[TRAIN]
    loader = pretrained.loader(train, batch_size=8)

    def predicted(key, model):
        members = METHODS[key].fit(model, loader)
        return members.predict({TRAIN: loader})[TRAIN]

    first = fine_tune(pretrained, train, seed=0)
    second = fine_tune(pretrained, train, seed=1000)
    third = fine_tune(pretrained, train, seed=2000)
    each = torch.stack([predicted("map", member) for member in (first, second, third)])
    assert not torch.equal(each[0], each[1])
    assert torch.allclose(predicted("deep_ensemble", first), each.mean(0))
    assert list(first.checkpoints) == [1, 2, 3, 4]
    # An ensemble of an earlier checkpoint has the others' at the same step.
    early = first.at(3)
    assert list(early.checkpoints) == [1, 2, 3]
    at_three = [early, second.at(3), third.at(3)]
    each = torch.stack([predicted("map", member) for member in at_three])
    assert torch.allclose(predicted("deep_ensemble", early), each.mean(0))
    at_steps = [predicted("map", first.at(step)) for step in (2, 3, 4)]
    ensemble = predicted("checkpoint_ensemble", first)
    assert torch.allclose(ensemble, torch.stack(at_steps).mean(0))
    dropout = predicted("mc_dropout", first)
    assert not torch.allclose(dropout, at_steps[-1], atol=1e-6)
    assert not first.model.training


def test_a_training_is_read_from_the_cache(prepared, monkeypatch):
    pretrained = prepared("mrpc")
    train = pretrained.data[TRAIN]
    loader = pretrained.loader(train, batch_size=2)
    trained = fine_tune(pretrained, train, seed=0).logits(loader)
    trainings = []
    original = fine_tuning_module.train

    def counted(*args, **kwargs):
        trainings.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(fine_tuning_module, "train", counted)
    again = fine_tune(pretrained, train, seed=0)
    assert torch.equal(again.logits(loader), trained)
    assert list(again.checkpoints) == [1, 2]
    assert not trainings
    settings = replace(pretrained.hyperparameters, learning_rate=1e-3)
    other = replace(pretrained, hyperparameters=settings)
    fine_tune(pretrained, train, seed=1)
    assert len(trainings) == 1
    fine_tune(pretrained, train[1:], seed=0)
    assert len(trainings) == 2
    fine_tune(other, train, seed=0)
    assert len(trainings) == 3


def test_a_temperature_is_recovered():
    torch.manual_seed(0)
    logits = 3 * torch.randn(20000, 4)
    labels = torch.distributions.Categorical(logits=logits / 2.5).sample()
    assert fit_temperature(logits, labels) == pytest.approx(2.5, rel=0.05)
    # The mean of two members is fitted, not each: opposite logits cancel at any
    # temperature.
    alike = torch.stack([logits, logits])
    assert fit_temperature(alike, labels) == pytest.approx(2.5, rel=0.05)
    noise = torch.randn(logits.shape)
    apart = torch.stack([logits, logits + 3 * noise])
    assert fit_temperature(apart, labels) < fit_temperature(apart[1], labels)
