"""Rivals that predict with sampled weights: noise, trainings, what they leave."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close
from torch.utils.data import DataLoader

from benchmarks.fine_tuning import Pretrained
from benchmarks.methods import METHODS, sampled
from benchmarks.methods.sampled import (
    DEVIATION,
    BLoB,
    IVONLoRA,
    noise_basis,
    training_free,
)
from benchmarks.models import AdaptedModel
from benchmarks.training import Recipe
from tests.benchmarks.support import (
    assert_same,
    assert_sum_to_1,
    copied,
    drawn_logits,
    predicted,
    probabilities_of,
    trained,
    trained_again,
    training_texts,
)
from tests.support.models import lora_model, ragged_batches

# --- TFB ------------------------------------------------------------------------------


def test_tfb_takes_the_most_noise_that_changes_few_classes(monkeypatch):
    monkeypatch.setattr(sampled, "MOST_CHANGED", 0.2)
    model = AdaptedModel(lora_model("bert", hidden_size=32).eval())
    batches = ragged_batches(12 * (7, 4, 5, 7, 3, 6, 2, 7), batch_size=24)
    texts = DataLoader(batches, batch_size=None)
    before = copied(model.model)
    noisy = predicted(training_free(model, texts), texts)
    assert_same(model.model, before)
    p = probabilities_of(model, texts)
    share_changed = (noisy.argmax(-1) != p.argmax(-1)).double().mean()
    # A search by halves comes near the most from below.
    assert 0.14 < share_changed <= 0.2
    assert (noisy - p).abs().mean() > 0.003


def effect_of_noise(B: Tensor) -> Tensor:
    """Return the covariance of lora_B times the noise of lora_A."""
    effect = B @ noise_basis(B)
    return effect @ effect.mT


@pytest.mark.parametrize("shape", [(7, 3), (2, 3)])
def test_noise_of_tfb_is_isotropic_in_the_columns_of_lora_b(shape):
    torch.manual_seed(0)
    B = torch.randn(shape).double() * torch.tensor([5.0, 1.0, 0.1])
    U, _, _ = torch.linalg.svd(B, full_matrices=False)
    assert_close(effect_of_noise(B), U @ U.mT)


def test_noise_of_tfb_has_no_direction_that_lora_b_does_not_read():
    assert noise_basis(torch.zeros(7, 3)).count_nonzero() == 0
    torch.manual_seed(0)
    column = torch.randn(7, 1)
    direction = column / column.norm()
    of_rank_1 = column @ torch.randn(1, 3)
    assert_close(effect_of_noise(of_rank_1), direction @ direction.mT)


# --- rivals that train ----------------------------------------------------------------


@dataclass(frozen=True)
class Rival:
    """A rival that trains a model of its own, beside the one that is trained."""

    key: str
    recipe: Recipe
    noisy_part: str  # of the names of weights
    pretrained: Pretrained
    model: AdaptedModel

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The weights that are trained by maximum likelihood."""
        named = self.model.model.named_parameters()
        return {name: weight for name, weight in named if weight.requires_grad}

    def fit(self):
        """Train, or read what is trained from the cache."""
        return METHODS[self.key].fit(self.model, training_texts(self.pretrained))

    def trained(self) -> dict[str, Any]:
        """Return the weights and deviations of the last step."""
        other = trained_again(self.model, self.recipe)
        assert list(other.checkpoints) == [1, 2, 3]
        return other.checkpoints[3]


RIVALS = {
    "BLoB": ("blob", "obqa", BLoB(), "lora_A"),
    # Every weight that is trained, heads included.
    "IVON": ("ivon", "mrpc", IVONLoRA(), ""),
}


@pytest.fixture(params=RIVALS)
def rival(request, prepared):
    key, task, recipe, noisy_part = RIVALS[request.param]
    pretrained = prepared(task, steps=3, learning_rate=1e-2)
    return Rival(key, recipe, noisy_part, pretrained, trained(pretrained))


def test_a_rival_trains_a_model_of_its_own_whose_members_differ(rival):
    texts = training_texts(rival.pretrained)
    model = rival.model.model
    before = copied(model)
    members = rival.fit()
    p = predicted(members, texts)
    assert_sum_to_1(p)
    # The next one is read from the cache.
    assert torch.equal(predicted(rival.fit(), texts), p)
    assert_same(model, before)
    # The recipe has trained other weights than maximum likelihood has.
    kept = rival.trained()
    weights = rival.weights.items()
    assert any(not torch.equal(kept[name], weight) for name, weight in weights)

    (batch,) = texts
    first, *others = drawn_logits(members, batch)
    assert others
    assert not any(torch.equal(draw, first) for draw in others)


def test_a_rival_learns_a_deviation_of_each_weight_that_has_noise(rival):
    deviations = {
        name.removesuffix(DEVIATION): value
        for name, value in rival.trained().items()
        if name.endswith(DEVIATION)
    }
    weights = rival.weights
    assert set(deviations) == {name for name in weights if rival.noisy_part in name}
    for name, deviation in deviations.items():
        assert deviation.shape == weights[name].shape
        assert torch.isfinite(deviation).all()
        assert (deviation > 0).all()


# An epoch has three steps: the shares double, and begin anew with the next epoch.
@pytest.mark.parametrize(("step", "share"), [(1, 1 / 8), (3, 1 / 2), (4, 1 / 8)])
def test_a_step_of_blobs_divergence_is_one_against_its_gradient(step, share):
    torch.manual_seed(0)
    layer = nn.Linear(5, 3, bias=False).double()
    # One matrix where PEFT has it.
    model = nn.ModuleDict({"lora_A": nn.ModuleDict({"default": layer})})
    recipe = BLoB()
    recipe.prepare(model)
    weight = layer.weight.detach().clone().requires_grad_()
    spread = layer.spread.detach().clone().requires_grad_()

    zero = torch.tensor(0.0).double()
    prior = Normal(zero, recipe.prior_deviation)
    divergence = kl_divergence(Normal(weight, spread.square()), prior).sum()
    of_weight, of_spread = torch.autograd.grad(divergence, [weight, spread])
    rate = 0.5 * share * recipe.learning_rate
    recipe.after_step(model, step, steps_an_epoch=3, pace=0.5)
    assert_close(layer.weight, weight - rate * of_weight)
    assert_close(layer.spread, spread - rate * of_spread)


def test_ivons_learning_rate_is_not_rescaled(prepared):
    model = trained(prepared("mrpc", steps=3, learning_rate=1e-2))

    def after_first_step(learning_rate):
        recipe = IVONLoRA(learning_rate=learning_rate)
        return trained_again(model, recipe).checkpoints[1]

    slow, fast = after_first_step(1.0), after_first_step(2.0)
    moved = [(slow[name] - fast[name]).abs().max() for name in slow if "lora_A" in name]
    # A step is the rate times a clipped 1e-3; rescaled by the first Hessian it would be
    # 3e-7.
    assert max(moved) > 1e-5
