"""Rivals that predict with sampled weights: noise, trainings, what they leave."""

import copy

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close
from torch.utils.data import DataLoader

from benchmarks.fine_tuning import TRAIN, fine_tune
from benchmarks.methods import METHODS, sampled
from benchmarks.methods.sampled import (
    DEVIATION,
    BLoB,
    IVONLoRA,
    noise_basis,
    training_free,
)
from benchmarks.models import AdaptedModel
from tests.support.models import lora_model, ragged_batches


def copied(model):
    return copy.deepcopy(model.state_dict())


def assert_same(model, before):
    """Demand that a model has its weights of before."""
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_tfb_takes_the_most_noise_that_changes_few_classes(monkeypatch):
    monkeypatch.setattr(sampled, "MOST_CHANGED", 0.2)
    model = AdaptedModel(lora_model("bert", hidden_size=32).eval())
    lengths = (7, 4, 5, 7, 3, 6, 2, 7) * 12
    batches = ragged_batches(lengths=lengths, batch_size=24)
    texts = DataLoader(batches, batch_size=None)
    before = copied(model.model)
    members = training_free(model, texts)
    noisy = members.predict({"train": texts})["train"]
    assert_same(model.model, before)
    p = model.logits(texts).softmax(-1)
    is_changed = noisy.argmax(-1) != p.argmax(-1)
    assert 0.14 < is_changed.double().mean() <= 0.2
    assert (noisy - p).abs().mean() > 0.003


@pytest.mark.parametrize("shape", [(7, 3), (2, 3)])
def test_noise_of_tfb_is_isotropic_in_the_columns_of_lora_b(shape):
    torch.manual_seed(0)
    scales = torch.tensor([5.0, 1.0, 0.1])
    B = torch.randn(shape).double() * scales
    effect = B @ noise_basis(B)  # on independent standard normal numbers
    U = torch.linalg.svd(B, full_matrices=False).U
    assert_close(effect @ effect.mT, U @ U.mT)
    # None where B reads nothing.
    assert noise_basis(torch.zeros(7, 3)).count_nonzero() == 0
    # Of rank 1 there is one direction.
    B = torch.randn(7, 1) @ torch.randn(1, 3)
    effect = B @ noise_basis(B)
    column = B[:, :1] / B[:, :1].norm()
    assert_close(effect @ effect.mT, column @ column.mT)


@pytest.mark.parametrize(
    ("key", "recipe", "task"),
    [
        ("blob", BLoB, "obqa"),
        ("ivon", IVONLoRA, "mrpc"),
    ],
)
def test_a_rival_trains_a_model_of_its_own(key, recipe, task, prepared):
    pretrained = prepared(task, steps=3, learning_rate=1e-2)
    train = pretrained.data[TRAIN]
    model = fine_tune(pretrained, train, seed=0)
    before = copied(model.model)
    loader = pretrained.loader(train, batch_size=8)
    trained = {name: p for name, p in model.model.named_parameters() if p.requires_grad}
    members = METHODS[key].fit(model, loader)
    probabilities = members.predict({TRAIN: loader})[TRAIN]
    again = METHODS[key].fit(model, loader)  # of a training that is read from the cache
    assert torch.equal(again.predict({TRAIN: loader})[TRAIN], probabilities)
    assert_same(model.model, before)
    assert torch.allclose(probabilities.sum(-1), torch.ones(len(train)))
    batch = next(iter(loader))
    draws = [logits_of(batch).detach() for logits_of in members.logits()]
    assert not any(torch.equal(draws[0], draw) for draw in draws[1:])
    other = model.retrained(recipe())
    assert list(other.checkpoints) == [1, 2, 3]
    kept = other.checkpoints[3]
    deviations = {name: kept[name] for name in kept if name.endswith(DEVIATION)}
    noisy = list(trained)
    if key == "blob":
        noisy = [name for name in trained if "lora_A" in name]
    assert set(deviations) == {name + DEVIATION for name in noisy}
    for name, deviation in deviations.items():
        assert deviation.shape == trained[name.removesuffix(DEVIATION)].shape
        assert torch.isfinite(deviation).all()
        assert (deviation > 0).all()
    # The recipe has trained other weights than maximum likelihood has.
    assert any(not torch.equal(kept[name], weight) for name, weight in trained.items())


class Adapter(nn.Module):
    """One matrix where PEFT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_A = nn.ModuleDict({"default": nn.Linear(5, 3, bias=False)})


# An epoch has three steps: the shares double, and begin anew with the next epoch.
@pytest.mark.parametrize(
    ("step", "share"),
    [
        (1, 1 / 8),
        (3, 1 / 2),
        (4, 1 / 8),
    ],
)
def test_a_step_of_blobs_divergence_is_one_against_its_gradient(step, share):
    torch.manual_seed(0)
    model = Adapter().double()
    recipe = BLoB()
    recipe.prepare(model)
    layer = model.lora_A["default"]
    weight = layer.weight.detach().clone().requires_grad_()
    spread = layer.spread.detach().clone().requires_grad_()
    posterior = Normal(weight, spread.square())
    prior = Normal(torch.tensor(0.0).double(), recipe.prior_deviation)
    divergence = kl_divergence(posterior, prior).sum()
    of_weight, of_spread = torch.autograd.grad(divergence, [weight, spread])
    recipe.after_step(model, step, steps_an_epoch=3, pace=0.5)
    rate = 0.5 * share * recipe.learning_rate
    assert_close(layer.weight, weight - rate * of_weight)
    assert_close(layer.spread, spread - rate * of_spread)


def test_ivons_learning_rate_is_not_rescaled(prepared):
    pretrained = prepared("mrpc", steps=3, learning_rate=1e-2)
    model = fine_tune(pretrained, pretrained.data[TRAIN], seed=0)
    (first, *_) = model.retrained(IVONLoRA(learning_rate=1.0)).checkpoints.values()
    (other, *_) = model.retrained(IVONLoRA(learning_rate=2.0)).checkpoints.values()
    moved = max(
        float((first[name] - other[name]).abs().max())
        for name in first
        if "lora_A" in name
    )
    # A step is the rate times a clipped 1e-3; rescaled by the first Hessian it would be
    # 3e-7.
    assert moved > 1e-5
