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


TWELVE_TIMES_EIGHT = 12 * (7, 4, 5, 7, 3, 6, 2, 7)


def test_tfb_takes_the_most_noise_that_changes_few_classes(monkeypatch):
    monkeypatch.setattr(sampled, "MOST_CHANGED", 0.2)
    plain = lora_model("bert", hidden_size=32)
    model = AdaptedModel(plain.eval())
    batches = ragged_batches(
        lengths=TWELVE_TIMES_EIGHT,
        batch_size=24,
    )
    texts = DataLoader(batches, batch_size=None)
    before = copied(model.model)

    members = training_free(model, texts)
    noisy = predicted(members, texts)

    assert_same(model.model, before)
    p = probabilities_of(model, texts)
    is_changed = noisy.argmax(-1) != p.argmax(-1)
    share_changed = is_changed.double().mean()
    # A search by halves comes near the most from below.
    assert 0.14 < share_changed <= 0.2
    change = (noisy - p).abs()
    assert change.mean() > 0.003


def effect_of_noise(B: Tensor) -> Tensor:
    """Multiply lora_B by the noise of lora_A, per independent standard normal."""
    return B @ noise_basis(B)


@pytest.mark.parametrize("shape", [(7, 3), (2, 3)])
def test_noise_of_tfb_is_isotropic_in_the_columns_of_lora_b(shape):
    torch.manual_seed(0)
    scales = torch.tensor([5.0, 1.0, 0.1])
    B = torch.randn(shape).double() * scales
    effect = effect_of_noise(B)
    U, _, _ = torch.linalg.svd(B, full_matrices=False)
    assert_close(effect @ effect.mT, U @ U.mT)


def test_tfb_has_no_noise_where_lora_b_reads_nothing():
    B = torch.zeros(7, 3)
    basis = noise_basis(B)
    assert basis.count_nonzero() == 0


def test_noise_of_tfb_has_one_direction_where_lora_b_has_rank_1():
    torch.manual_seed(0)
    column = torch.randn(7, 1)
    B = column @ torch.randn(1, 3)
    effect = effect_of_noise(B)
    direction = column / column.norm()
    assert_close(effect @ effect.mT, direction @ direction.mT)


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
        weights = {}
        for name, weight in self.model.model.named_parameters():
            if weight.requires_grad:
                weights[name] = weight
        return weights

    def fit(self):
        """Train, or read what is trained from the cache."""
        texts = training_texts(self.pretrained)
        return METHODS[self.key].fit(self.model, texts)

    def trained(self) -> dict[str, Any]:
        """Return the weights and deviations of the last step."""
        other = trained_again(self.model, self.recipe)
        assert list(other.checkpoints) == [1, 2, 3]
        return other.checkpoints[3]


@pytest.fixture(params=["BLoB", "IVON"])
def rival(request, prepared):
    if request.param == "BLoB":
        key = "blob"
        task = "obqa"
        recipe = BLoB()
        noisy_part = "lora_A"
    else:
        key = "ivon"
        task = "mrpc"
        recipe = IVONLoRA()
        # Every weight that is trained, heads included.
        noisy_part = ""
    pretrained = prepared(task, steps=3, learning_rate=1e-2)
    return Rival(
        key=key,
        recipe=recipe,
        noisy_part=noisy_part,
        pretrained=pretrained,
        model=trained(pretrained),
    )


def test_a_rival_trains_a_model_of_its_own(rival):
    texts = training_texts(rival.pretrained)
    model = rival.model.model
    before = copied(model)

    members = rival.fit()
    p = predicted(members, texts)
    assert_sum_to_1(p)
    read = rival.fit()  # of a training that is in the cache
    assert torch.equal(predicted(read, texts), p)
    assert_same(model, before)

    # The recipe has trained other weights than maximum likelihood has.
    kept = rival.trained()
    differs = []
    for name, weight in rival.weights.items():
        is_same = torch.equal(kept[name], weight)
        differs.append(not is_same)
    assert any(differs)


def test_a_rivals_members_differ(rival):
    (batch,) = training_texts(rival.pretrained)
    members = rival.fit()
    first, *others = drawn_logits(members, batch)
    assert others
    for draw in others:
        assert not torch.equal(draw, first)


def test_a_rival_learns_a_deviation_of_each_weight_that_has_noise(rival):
    kept = rival.trained()
    deviations = {}
    for name, value in kept.items():
        if name.endswith(DEVIATION):
            of_weight = name.removesuffix(DEVIATION)
            deviations[of_weight] = value
    weights = rival.weights
    assert set(deviations) == {name for name in weights if rival.noisy_part in name}
    for name, deviation in deviations.items():
        assert deviation.shape == weights[name].shape
        assert torch.isfinite(deviation).all()
        assert (deviation > 0).all()


# --- BLoB's divergence ----------------------------------------------------------------


class Adapter(nn.Module):
    """One matrix where PEFT has it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(5, 3, bias=False)
        self.lora_A = nn.ModuleDict({"default": layer})


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
    zero = torch.tensor(0.0).double()
    prior = Normal(zero, recipe.prior_deviation)
    divergence = kl_divergence(posterior, prior).sum()
    of_weight, of_spread = torch.autograd.grad(divergence, [weight, spread])
    pace = 0.5
    rate = pace * share * recipe.learning_rate

    recipe.after_step(
        model,
        step,
        steps_an_epoch=3,
        pace=pace,
    )
    assert_close(layer.weight, weight - rate * of_weight)
    assert_close(layer.spread, spread - rate * of_spread)


# --- IVON's step ----------------------------------------------------------------------


def test_ivons_learning_rate_is_not_rescaled(prepared):
    pretrained = prepared("mrpc", steps=3, learning_rate=1e-2)
    model = trained(pretrained)

    def after_first_step(learning_rate):
        recipe = IVONLoRA(learning_rate=learning_rate)
        again = trained_again(model, recipe)
        return again.checkpoints[1]

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
