"""Rivals that train again: by deviations, SWAG, MonteCLoRA, and a student."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from torch.utils.data import DataLoader

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
from benchmarks.tasks.balanced import ENCODER
from benchmarks.training import train
from tests.benchmarks.support import predicted, trained, training_texts


def drawn_logits(members: Members, batch: Any) -> Tensor:
    """Compute a batch's logits by each member, `(members, texts, classes)`."""
    return torch.stack([logits_of(batch).detach() for logits_of in members.logits()])


# --- learnt deviations ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "recipe", "noisy_part"),
    [
        ("blob", BLoB(), "lora_A"),
        # Every weight that is trained, heads included.
        ("ivon", IVONLoRA(), ""),
    ],
)
def test_a_rival_trains_a_model_of_its_own_with_deviations(
    key, recipe, noisy_part, prepared
):
    pretrained = prepared("--steps 3")
    (batch,) = texts = training_texts(pretrained)
    model = trained(pretrained)
    before = model.logits(texts)
    draws = drawn_logits(METHODS[key].fit(model, texts), batch)
    assert draws.std(0).min() > 0
    assert torch.equal(model.logits(texts), before)

    first, _, last = model.retrained(recipe).checkpoints.values()
    named = model.model.named_parameters()
    weights = {name for name, weight in named if weight.requires_grad}
    deviations = {name for name in last if name.endswith(DEVIATION)}
    assert deviations == {name + DEVIATION for name in weights if noisy_part in name}
    assert all((last[name] > 0).all() for name in deviations)
    # A step is the rate times a clipped 1e-3; rescaled by IVON's first Hessian it would
    # be 3e-7.
    moved = [(last[name] - first[name]).abs().max() for name in weights]
    assert max(moved) > 1e-5


# An epoch has three steps: the shares double, and begin anew with the next epoch.
@pytest.mark.parametrize(("step", "share"), [(1, 1 / 8), (3, 1 / 2), (4, 1 / 8)])
def test_a_step_of_blobs_divergence_is_one_against_its_gradient(step, share):
    torch.manual_seed(0)
    layer = nn.Linear(5, 3, bias=False).double()
    # One matrix where PEFT has it.
    model = nn.ModuleDict({"lora_A": nn.ModuleDict({"default": layer})})
    recipe = BLoB()
    recipe.prepare(model)
    numbers = [layer.weight, layer.spread]
    prior = Normal(torch.tensor(0.0).double(), recipe.prior_deviation)
    divergence = kl_divergence(Normal(layer.weight, layer.spread.square()), prior).sum()
    slopes = torch.autograd.grad(divergence, numbers)
    rate = 0.5 * share * recipe.learning_rate
    expected = [
        number - rate * slope for number, slope in zip(numbers, slopes, strict=True)
    ]
    recipe.after_step(model, step, steps_an_epoch=3, pace=0.5)
    assert_close(numbers, expected)


# --- SWAG -----------------------------------------------------------------------------

TWELVE_STEPS = replace(ENCODER, steps=12, warmup_steps=2)


def test_swags_rate_is_constant_in_the_tail():
    recipe, paces = SWAG(rate=0.4, tail=0.5), []
    recipe.after_step = lambda *_, pace, **others: paces.append(pace)
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(torch.ones(4, 1))
    train(model, loader, lambda x: model(x).sum(), TWELVE_STEPS, False, recipe)
    rising = [0.0, 0.5]
    falling = [1.0, 0.85, 0.7, 0.55]
    assert paces == pytest.approx(rising + falling + 6 * [0.4])


@pytest.mark.parametrize(
    ("recipe", "steps"),
    [
        (SWAG(tail=0.5, iterates=3), [8, 10, 12]),
        # Each step is kept of a tail that is shorter than asked for, and a deviation
        # needs two of them.
        (SWAG(tail=0.01), [11, 12]),
    ],
)
def test_swag_keeps_steps_at_equal_distances_of_the_tail(recipe, steps):
    assert recipe.kept_steps(TWELVE_STEPS) == steps


def test_swags_covariance_is_half_diagonal_and_half_that_of_the_iterates():
    torch.manual_seed(0)
    # Two weights, of which the second varies twice as much.
    numbers = torch.tensor([1, 1, 2, 2]) * torch.randn(4, 4).double()
    gaussian = Iterates.of([{"a": row[:2], "b": row[2:]} for row in numbers])
    # By NumPy's divisors: the paper's variances have K, its low-rank part has K - 1.
    variances = numbers.var(0, correction=0)
    expected = (variances.diag() + numbers.mT.cov()) / 2

    generator = torch.Generator().manual_seed(0)
    draws = [torch.cat([*gaussian(generator).values()]) for _ in range(5_000)]
    assert_close(torch.cat([*gaussian.mean.values()]), numbers.mean(0))
    # Four standard errors, sqrt(2 / 5,000) each, of a variance of 5,000 draws.
    largest_variance = expected.diag().max()
    error = torch.stack(draws).mT.cov() - expected
    assert error.abs().max() < 0.08 * largest_variance
    # They are drawn around 0: how far from the mean.
    mean = torch.stack(draws).mean(0)
    assert mean.abs().max() < 0.08 * largest_variance.sqrt()


def test_swag_predicts_around_the_mean_of_its_iterates(prepared):
    pretrained = prepared("--steps 8")
    (batch,) = texts = training_texts(pretrained)
    model = trained(pretrained)
    recipe = SWAG(tail=0.5, iterates=4)
    first, *_ = drawn_logits(of_iterates(recipe, model, texts), batch)
    again = model.retrained(recipe)
    assert list(again.checkpoints) == [5, 6, 7, 8]

    # The first draw is that of seed 0, around the mean.
    gaussian = Iterates.of(list(again.checkpoints.values()))
    apart = gaussian(torch.Generator().manual_seed(0))
    drawn = {name: mean + apart[name] for name, mean in gaussian.mean.items()}
    again.model.load_state_dict(drawn, strict=False)
    assert_close(first, again.logits(texts))


# --- MonteCLoRA -----------------------------------------------------------------------


def test_monteclora_adds_pefts_penalty_and_predicts_with_lora_a_itself(prepared):
    pretrained = prepared("--steps 2")
    (batch,) = texts = training_texts(pretrained)
    recipe = MonteCLoRA(scale=0.1, divergence=1e-2)
    model = trained(pretrained)
    members = alone(recipe, model, texts)
    # Samples of lora_A would differ each time.
    assert torch.equal(predicted(members, texts), predicted(members, texts))

    adapted = model.retrained(recipe)
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


def test_a_student_learns_the_mean_of_an_ensemble(prepared):
    pretrained = prepared("--steps 4")
    (batch,) = texts = training_texts(pretrained)
    model = trained(pretrained)
    teachers = ensemble(model)
    recipe = Distilled(teachers)
    student = model.retrained(recipe)
    p = torch.stack([each.logits(texts).double().softmax(-1) for each in teachers])
    p = p.mean(0)
    q = student.logits(texts).double().softmax(-1)
    expected = (p * (p / q).log()).sum(-1).mean().item()
    # Little is left of a difference between numbers in float32 that are nearly equal.
    assert expected > 1e-6
    loss = recipe.loss(student.logits_model, batch, batch["labels"])
    assert loss.item() == pytest.approx(expected, rel=1e-3)
    found = predicted(distilled(model, texts), texts)
    assert_close(found.double(), q)
