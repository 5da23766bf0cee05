"""Rivals that train again: by deviations, SWAG, MonteCLoRA, and a student."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from benchmarks.methods import METHODS
from benchmarks.methods.method import Members, ensemble
from benchmarks.methods.trained_again import (
    DEVIATION,
    SWAG,
    BLoB,
    Distilled,
    Iterates,
    IVONLoRA,
    MonteCLoRA,
    alone,
    distilled,
    of_iterates,
)
from benchmarks.models import AdaptedModel
from benchmarks.training import Hyperparameters, Recipe
from tests.benchmarks.support import (
    assert_same,
    assert_sum_to_1,
    copied,
    drawn_logits,
    predicted,
    probabilities_of,
    trained,
    training_texts,
)


def trained_again(model: AdaptedModel, recipe: Recipe) -> AdaptedModel:
    """Fine-tune the same tiny model by another recipe."""
    assert model.retrained is not None
    return model.retrained(recipe)


# --- learnt deviations ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "task", "recipe", "noisy_part"),
    [
        ("blob", "obqa", BLoB(), "lora_A"),
        # Every weight that is trained, heads included.
        ("ivon", "mrpc", IVONLoRA(), ""),
    ],
)
def test_a_rival_trains_a_model_of_its_own_with_deviations(
    key, task, recipe, noisy_part, prepared
):
    pretrained = prepared(task, steps=3, learning_rate=1e-2)
    texts = training_texts(pretrained)
    adapted = trained(pretrained)
    before = copied(adapted.model)
    members = METHODS[key].fit(adapted, texts)
    p = predicted(members, texts)
    assert_sum_to_1(p)
    # The next one is read from the cache.
    assert torch.equal(predicted(METHODS[key].fit(adapted, texts), texts), p)
    assert_same(adapted.model, before)
    (batch,) = texts
    first, *others = drawn_logits(members, batch)
    assert others
    assert not any(torch.equal(draw, first) for draw in others)

    other = trained_again(adapted, recipe)
    assert list(other.checkpoints) == [1, 2, 3]
    kept = other.checkpoints[3]
    named = adapted.model.named_parameters()
    weights = {name: weight for name, weight in named if weight.requires_grad}
    # The recipe has trained other weights than maximum likelihood has.
    assert any(not torch.equal(kept[name], weights[name]) for name in weights)
    deviations = {
        name.removesuffix(DEVIATION): value
        for name, value in kept.items()
        if name.endswith(DEVIATION)
    }
    assert set(deviations) == {name for name in weights if noisy_part in name}
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
    model = trained(prepared("mrpc", steps=1))
    slow, fast = (
        trained_again(model, IVONLoRA(learning_rate=rate)).checkpoints[1]
        for rate in (1.0, 2.0)
    )
    moved = [(slow[name] - fast[name]).abs().max() for name in slow if "lora_A" in name]
    # A step is the rate times a clipped 1e-3; rescaled by the first Hessian it would be
    # 3e-7.
    assert max(moved) > 1e-5


# --- SWAG -----------------------------------------------------------------------------

TWELVE_STEPS = Hyperparameters(
    model="",
    target_modules=(),
    batch_size=1,
    maximum_length=1,
    steps=12,
    warmup_steps=2,
)


def test_swags_rate_is_constant_in_the_tail():
    recipe = SWAG(rate=0.4, tail=0.5)
    paces = [recipe.pace(step, TWELVE_STEPS) for step in range(TWELVE_STEPS.steps)]
    rising = [0.0, 0.5]
    falling = [1.0, 0.85, 0.7, 0.55]
    tail = [0.4] * 6
    assert paces == pytest.approx(rising + falling + tail)


@pytest.mark.parametrize(
    ("recipe", "steps"),
    [
        (SWAG(tail=0.5, iterates=3), [8, 10, 12]),
        # Each step is kept of a tail that is shorter than asked for, and a deviation
        # needs two of them.
        (SWAG(tail=0.25), [10, 11, 12]),
        (SWAG(tail=0.01, iterates=3), [11, 12]),
    ],
)
def test_swag_keeps_steps_at_equal_distances_of_the_tail(recipe, steps):
    assert recipe.kept_steps(TWELVE_STEPS) == steps


def test_swags_covariance_is_half_diagonal_and_half_that_of_the_iterates():
    torch.manual_seed(0)
    # Two weights, of which the second varies twice as much.
    iterates = [
        {"a": torch.randn(2).double(), "b": 2 * torch.randn(1, 2).double()}
        for _ in range(4)
    ]

    def flat(weights: dict[str, Tensor]) -> Tensor:
        return torch.cat([weights["a"], weights["b"].flatten()])

    rows = torch.stack([flat(weights) for weights in iterates])
    # By NumPy's divisors: the paper's variances have K, its low-rank part has K - 1.
    variances = rows.var(0, correction=0)
    expected = (variances.diag() + rows.mT.cov()) / 2

    gaussian = Iterates.of(iterates)
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([flat(gaussian(generator)) for _ in range(20_000)])
    assert_close(flat(gaussian.mean), rows.mean(0))
    # Four standard errors, sqrt(2 / 20,000) each, of a variance of 20,000 draws.
    largest_variance = expected.diag().max()
    error = draws.mT.cov() - expected
    assert error.abs().max() < 0.04 * largest_variance
    # They are drawn around 0: how far from the mean.
    assert draws.mean(0).abs().max() < 0.04 * largest_variance.sqrt()


def test_swag_predicts_around_the_mean_of_its_iterates(prepared):
    pretrained = prepared("mrpc", steps=8, learning_rate=1e-2)
    texts = training_texts(pretrained)
    (batch,) = texts
    model = trained(pretrained)
    before = copied(model.model)
    recipe = SWAG(tail=0.5, iterates=4)
    members = of_iterates(recipe, model, texts)
    assert_same(model.model, before)
    again = trained_again(model, recipe)
    assert list(again.checkpoints) == [5, 6, 7, 8]
    draws = drawn_logits(members, batch)
    assert draws.std(0).min() > 0

    # The first draw is that of seed 0, around the mean.
    gaussian = Iterates.of(list(again.checkpoints.values()))
    apart = gaussian(torch.Generator().manual_seed(0))
    drawn = {name: mean + apart[name] for name, mean in gaussian.mean.items()}
    again.model.load_state_dict(drawn, strict=False)
    assert_close(draws[0], again.logits_model(batch).detach())


# --- MonteCLoRA -----------------------------------------------------------------------


def test_monteclora_adds_pefts_penalty_and_predicts_with_lora_a_itself(prepared):
    pretrained = prepared("mrpc", learning_rate=1e-2)
    (batch,) = texts = training_texts(pretrained)
    recipe = MonteCLoRA(scale=0.1, divergence=1e-2)
    model = trained(pretrained)
    before = copied(model.model)
    members = alone(recipe, model, texts)
    p = predicted(members, texts)
    # Samples of lora_A would differ each time.
    assert torch.equal(predicted(members, texts), p)
    assert not torch.equal(probabilities_of(model, texts), p)
    assert_same(model.model, before)

    adapted = trained_again(model, recipe)
    adapted.model.train()
    seen: list[Any] = []
    logits_model = adapted.logits_model
    with logits_model.register_forward_hook(lambda *each: seen.append(each[-1])):
        loss = recipe.loss(logits_model, batch, batch["labels"])
    penalties = [
        float(sum(module.get_variational_loss()))
        for name, module in adapted.model.named_modules()
        if name.endswith("lora_monteclora_sampler.default")
    ]
    assert len(penalties) == 4  # query and value of two layers
    penalty = sum(penalties) / len(penalties)
    assert abs(penalty) > 1e-3
    (logits,) = seen
    expected = cross_entropy(logits, batch["labels"]).item() + penalty
    assert loss.item() == pytest.approx(expected, rel=1e-5)


# --- students -------------------------------------------------------------------------


def test_a_students_loss_is_the_divergence_from_the_mean_of_its_teachers(prepared):
    pretrained = prepared("mrpc", steps=4, learning_rate=1e-2)
    (batch,) = training_texts(pretrained)
    *teachers, student = (trained(pretrained, seed) for seed in range(3))

    def loss_beside(*teachers: AdaptedModel) -> float:
        recipe = Distilled(teachers)
        return recipe.loss(student.logits_model, batch, batch["labels"]).item()

    first, second, q = (
        each.logits_model(batch).detach().double().softmax(-1)
        for each in (*teachers, student)
    )
    p = (first + second) / 2
    expected = (p * (p / q).log()).sum(-1).mean().item()
    # Little is left of a difference between numbers in float32 that are nearly equal.
    assert expected > 1e-6
    assert loss_beside(*teachers) == pytest.approx(expected, rel=1e-3)
    # Nothing is to learn from oneself.
    assert loss_beside(student) == pytest.approx(0, abs=1e-6)


def test_a_student_of_an_ensemble_is_one_model(prepared):
    pretrained = prepared("mrpc", steps=2, learning_rate=1e-2)
    texts = training_texts(pretrained)
    model = trained(pretrained)
    members = distilled(model, texts)
    assert len(list(members.logits())) == 1
    p = predicted(members, texts)
    recipe = Distilled(ensemble(model))
    assert len(recipe.teachers) == 3
    assert torch.equal(probabilities_of(trained_again(model, recipe), texts), p)
    assert not torch.equal(predicted(Members.of(recipe.teachers), texts), p)
