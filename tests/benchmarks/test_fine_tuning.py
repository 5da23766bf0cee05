"""The one fine-tuning, its cache, and methods on what it leaves, with tiny models."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import benchmarks.fine_tuning as fine_tuning_module
from benchmarks.fine_tuning import TEST, fine_tune
from benchmarks.methods import METHODS, posterior, priors
from benchmarks.methods.method import fit_temperature
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
    model = fine_tune(pretrained, pretrained.data["train"], seed=0)
    loaders = {TEST: pretrained.loader("train", 8)}
    predictions = [METHODS["map"].fit(model, loaders[TEST]).predict(loaders)]
    la = posterior("lowrank_kron").build(model)
    la.fit(loaders[TEST])
    predictions += [found["probabilities"] for found in priors.predictions(la, None, loaders)]
    texts = len(pretrained.task.train)
    for found in predictions:
        assert found[TEST].shape == (texts, len(PAPER_TASKS[name].classes))
        assert torch.allclose(found[TEST].sum(-1), torch.ones(texts), atol=1e-4)


def test_tfbs_rule_takes_the_smallest_prior_precision_that_changes_few_classes():
    torch.manual_seed(0)
    f_mu, tried = torch.randn(200, 3), []

    def moments(value):
        tried.append(value)
        return Moments(f_mu, torch.eye(3).expand(200, 3, 3) / value)

    chosen = by_tfb_rule(None, SimpleNamespace(moments=moments))
    assert torch.equal(torch.cat(tried), GRID[: len(tried)])
    assert torch.equal(chosen, tried[-1])
    noise = torch.randn((10, 200, 3), generator=torch.Generator().manual_seed(0))
    changed = [
        ((f_mu + noise / value.sqrt()).softmax(-1).mean(0).argmax(-1) != f_mu.argmax(-1)).sum()
        for value in tried
    ]
    assert changed[-1] <= 2 < min(changed[:-1])


def test_ensembles_average_probabilities(prepared):
    pretrained = prepared("mrpc", steps=4, checkpoints=4)
    train = pretrained.data["train"]
    loader = pretrained.loader(train, 8)

    def predicted(key, model):
        return METHODS[key].fit(model, loader).predict({"train": loader})["train"]

    first = fine_tune(pretrained, train, 0)
    members = [first, *(fine_tune(pretrained, train, seed) for seed in (1000, 2000))]
    each = torch.stack([predicted("map", member) for member in members])
    assert not torch.equal(each[0], each[1])
    assert torch.allclose(predicted("deep_ensemble", first), each.mean(0))
    assert list(first.checkpoints) == [1, 2, 3, 4]
    early = first.at(3)
    assert list(early.checkpoints) == [1, 2, 3]
    others = [member.at(3) for member in members[1:]]
    at_three = torch.stack([predicted("map", member) for member in (early, *others)])
    assert torch.allclose(predicted("deep_ensemble", early), at_three.mean(0))
    at_steps = [predicted("map", first.at(step)) for step in (2, 3, 4)]
    ensemble = predicted("checkpoint_ensemble", first)
    assert torch.allclose(ensemble, torch.stack(at_steps).mean(0))
    dropout = predicted("mc_dropout", first)
    assert not torch.allclose(dropout, at_steps[-1], atol=1e-6)
    assert not first.model.training


def test_a_training_is_read_from_the_cache(prepared, monkeypatch):
    pretrained = prepared("mrpc")
    train = pretrained.data["train"]
    loader = pretrained.loader(train, 2)
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
    for anew in ((pretrained, train, 1), (pretrained, train[1:], 0), (other, train, 0)):
        before = len(trainings)
        fine_tune(*anew)
        assert len(trainings) == before + 1


def test_a_temperature_is_recovered():
    torch.manual_seed(0)
    logits = 3 * torch.randn(20000, 4)
    labels = torch.distributions.Categorical(logits=logits / 2.5).sample()
    assert fit_temperature(logits, labels) == pytest.approx(2.5, rel=0.05)
    # The mean of two members is fitted, not each: opposite logits cancel at any temperature.
    assert fit_temperature(torch.stack([logits, logits]), labels) == pytest.approx(2.5, rel=0.05)
    apart = torch.stack([logits, logits + 3 * torch.randn(logits.shape)])
    assert fit_temperature(apart, labels) < fit_temperature(apart[1], labels)
