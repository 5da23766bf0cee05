"""Rivals that predict with sampled weights: noise, trainings, what they leave."""

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close
from torch.utils.data import DataLoader

from benchmarks.methods import METHODS, sampled
from benchmarks.methods.sampled import (
    DEVIATION,
    BLoB,
    IVONLoRA,
    noise_basis,
    training_free,
)
from benchmarks.models import AdaptedModel
from tests.benchmarks.support import (
    assert_same,
    copied,
    drawn_logits,
    predicted,
    trained,
    training_texts,
)
from tests.support.models import lora_model, ragged_batches

# --- TFB ------------------------------------------------------------------------------


def test_tfb_takes_the_most_noise_that_changes_few_classes(monkeypatch):
    monkeypatch.setattr(sampled, "MOST_CHANGED", 0.2)
    model = AdaptedModel(lora_model("bert", hidden_size=32).eval())
    batches = ragged_batches(
        lengths=(7, 4, 5, 7, 3, 6, 2, 7) * 12,
        batch_size=24,
    )
    texts = DataLoader(batches, batch_size=None)
    before = copied(model.model)

    members = training_free(model, texts)
    noisy = predicted(members, texts)

    assert_same(model.model, before)
    p = model.logits(texts).softmax(-1)
    is_changed = noisy.argmax(-1) != p.argmax(-1)
    # A search by halves comes near the most from below.
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


def test_tfb_has_no_noise_where_lora_b_reads_nothing():
    B = torch.zeros(7, 3)
    assert noise_basis(B).count_nonzero() == 0


def test_noise_of_tfb_has_one_direction_where_lora_b_has_rank_1():
    torch.manual_seed(0)
    B = torch.randn(7, 1) @ torch.randn(1, 3)
    effect = B @ noise_basis(B)
    column = B[:, :1] / B[:, :1].norm()
    assert_close(effect @ effect.mT, column @ column.mT)


# --- rivals that train ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "recipe", "task", "noisy_part"),
    [
        pytest.param("blob", BLoB, "obqa", "lora_A", id="BLoB"),
        # IVON's noise is on every weight that is trained, heads included.
        pytest.param("ivon", IVONLoRA, "mrpc", "", id="IVON"),
    ],
)
def test_a_rival_trains_a_model_of_its_own(key, recipe, task, noisy_part, prepared):
    pretrained = prepared(task, steps=3, learning_rate=1e-2)
    texts = training_texts(pretrained)
    (batch,) = texts
    model = trained(pretrained)
    before = copied(model.model)
    of_map = {
        name: weight
        for name, weight in model.model.named_parameters()
        if weight.requires_grad
    }

    members = METHODS[key].fit(model, texts)
    probabilities = predicted(members, texts)
    assert torch.allclose(probabilities.sum(-1), torch.ones(len(probabilities)))
    read = METHODS[key].fit(model, texts)  # of a training that is in the cache
    assert torch.equal(predicted(read, texts), probabilities)
    assert_same(model.model, before)
    first, *others = drawn_logits(members, batch)
    for draw in others:
        assert not torch.equal(draw, first)

    other = model.retrained(recipe())
    assert list(other.checkpoints) == [1, 2, 3]
    kept = other.checkpoints[3]
    found = {name for name in kept if name.endswith(DEVIATION)}
    assert found == {name + DEVIATION for name in of_map if noisy_part in name}
    for name in found:
        weight = of_map[name.removesuffix(DEVIATION)]
        assert kept[name].shape == weight.shape
        assert torch.isfinite(kept[name]).all()
        assert (kept[name] > 0).all()
    # The recipe has trained other weights than maximum likelihood has.
    differs = [not torch.equal(kept[name], weight) for name, weight in of_map.items()]
    assert any(differs)


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
    rate = 0.5 * share * recipe.learning_rate

    recipe.after_step(model, step, steps_an_epoch=3, pace=0.5)
    assert_close(layer.weight, weight - rate * of_weight)
    assert_close(layer.spread, spread - rate * of_spread)


def test_ivons_learning_rate_is_not_rescaled(prepared):
    pretrained = prepared("mrpc", steps=3, learning_rate=1e-2)
    model = trained(pretrained)

    def after_first_step(learning_rate):
        recipe = IVONLoRA(learning_rate=learning_rate)
        first, *_ = model.retrained(recipe).checkpoints.values()
        return first

    slow = after_first_step(1.0)
    fast = after_first_step(2.0)
    moved = []
    for name in slow:
        if "lora_A" in name:
            apart = slow[name] - fast[name]
            moved.append(apart.abs().max())
    # A step is the rate times a clipped 1e-3; rescaled by the first Hessian it would be
    # 3e-7.
    assert max(moved) > 1e-5
