"""Rivals that train again: SWAG, MonteCLoRA, and a student of an ensemble."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from benchmarks.methods.method import Members, ensemble
from benchmarks.methods.swag import SWAG, Iterates, of_iterates
from benchmarks.methods.trained_again import (
    Distilled,
    MonteCLoRA,
    alone,
    distilled,
)
from benchmarks.training import Hyperparameters
from tests.benchmarks.support import (
    assert_same,
    copied,
    drawn_logits,
    predicted,
    probabilities_of,
    trained,
    trained_again,
    training_texts,
)

SAMPLER = "lora_monteclora_sampler"
"""What is in the names of what PEFT adds to a layer for MonteCLoRA."""

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
    paces = []
    for steps_done in range(TWELVE_STEPS.steps):
        pace = recipe.pace(steps_done, TWELVE_STEPS)
        paces.append(pace)
    rising = [0.0, 0.5]
    falling = [1.0, 0.85, 0.7, 0.55]
    tail = [0.4] * 6
    assert paces == pytest.approx(rising + falling + tail)


@pytest.mark.parametrize(
    ("tail", "steps"),
    [
        (0.5, [8, 10, 12]),
        # Of a tail of two steps each is kept, and a deviation needs two of them.
        (0.2, [11, 12]),
        (0.01, [11, 12]),
    ],
)
def test_swag_keeps_steps_at_equal_distances_of_the_tail(tail, steps):
    recipe = SWAG(tail=tail, iterates=3)
    kept = recipe.kept_steps(TWELVE_STEPS)
    assert kept == steps


def test_swag_keeps_each_step_of_a_tail_that_is_shorter_than_asked_for():
    recipe = SWAG(tail=0.25)
    kept = recipe.kept_steps(TWELVE_STEPS)
    assert kept == [10, 11, 12]


def four_iterates():
    """Draw two weights four times, of which the second varies twice as much."""
    torch.manual_seed(0)
    iterates = []
    for _ in range(4):
        a = torch.randn(2).double()
        b = 2 * torch.randn(1, 2).double()
        iterates.append({"a": a, "b": b})
    return iterates


def flat(weights) -> Tensor:
    """Join the numbers of weights "a" and "b"."""
    a = weights["a"]
    b = weights["b"].flatten()
    return torch.cat([a, b])


def test_swags_covariance_is_half_diagonal_and_half_that_of_the_iterates():
    iterates = four_iterates()
    rows = torch.stack([flat(weights) for weights in iterates])
    # By NumPy's divisors: the paper's variances have K, its low-rank part has K - 1.
    variances = rows.var(0, correction=0)
    covariance = rows.mT.cov()
    expected = (variances.diag() + covariance) / 2

    gaussian = Iterates.of(iterates)
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for _ in range(20_000):
        apart = gaussian(generator)
        drawn.append(flat(apart))
    draws = torch.stack(drawn)

    mean = flat(gaussian.mean)
    assert_close(mean, rows.mean(0))
    # Four standard errors, sqrt(2 / 20,000) each, of a variance of 20,000 draws.
    largest_variance = expected.diag().max()
    error = draws.mT.cov() - expected
    assert error.abs().max() < 0.04 * largest_variance
    # They are drawn around 0: how far from the mean.
    off_0 = draws.mean(0).abs()
    assert off_0.max() < 0.04 * largest_variance.sqrt()


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
    deviations = draws.std(0)
    assert deviations.min() > 0

    # The first draw is that of seed 0, around the mean.
    iterates = list(again.checkpoints.values())
    gaussian = Iterates.of(iterates)
    generator = torch.Generator().manual_seed(0)
    apart = gaussian(generator)
    drawn = {}
    for name, mean in gaussian.mean.items():
        drawn[name] = mean + apart[name]
    again.model.load_state_dict(drawn, strict=False)
    expected = again.logits_model(batch)
    assert_close(draws[0], expected.detach())


# --- MonteCLoRA -----------------------------------------------------------------------


@dataclass
class LogitsSeen:
    """Keeps the logits of each forward pass, as a hook."""

    of_passes: list[Tensor] = field(default_factory=list)

    def __call__(
        self,
        _module: nn.Module,
        _inputs: tuple,
        output: Tensor,
    ) -> None:
        self.of_passes.append(output)


def penalties_of(model: nn.Module) -> list[float]:
    """Take PEFT's penalty from each layer, as it stands after a forward pass."""
    penalties = []
    for name, module in model.named_modules():
        if name.endswith(f"{SAMPLER}.default"):
            sampler: Any = module
            parts = sampler.get_variational_loss()
            penalties.append(float(sum(parts)))
    return penalties


def test_monteclora_adds_pefts_penalty_to_the_loss(prepared):
    pretrained = prepared("mrpc", learning_rate=1e-2)
    (batch,) = training_texts(pretrained)
    labels = batch["labels"]
    recipe = MonteCLoRA(scale=0.1, divergence=1e-2)
    adapted = trained(pretrained, recipe=recipe)
    adapted.model.train()
    logits_model = adapted.logits_model
    seen = LogitsSeen()

    with logits_model.register_forward_hook(seen):
        loss = recipe.loss(logits_model, batch, labels)
        # Before another pass changes them.
        penalties = penalties_of(adapted.model)
        recipe.loss(logits_model, batch, labels)

    assert len(penalties) == 4  # query and value of two layers
    penalty = sum(penalties) / len(penalties)
    assert abs(penalty) > 1e-3
    first, second = seen.of_passes
    of_data = cross_entropy(first, labels).item()
    expected = of_data + penalty
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    # Steps differ in their samples.
    assert not torch.equal(first, second)


def test_monteclora_learns_what_it_samples_by(prepared):
    pretrained = prepared("mrpc", learning_rate=1e-2)
    (batch,) = training_texts(pretrained)
    recipe = MonteCLoRA(scale=0.1, divergence=1e-2)
    adapted = trained(pretrained, recipe=recipe)
    adapted.model.train()

    loss = recipe.loss(adapted.logits_model, batch, batch["labels"])
    loss.backward()

    gradients = []
    for name, weight in adapted.model.named_parameters():
        if SAMPLER in name:
            gradients.append(weight.grad)
    # Two weights of the samplers of query and value in two layers.
    assert len(gradients) == 2 * 4
    for gradient in gradients:
        assert gradient is not None
        assert gradient.count_nonzero() > 0


def test_monteclora_predicts_with_lora_a_itself(prepared):
    pretrained = prepared("mrpc", learning_rate=1e-2)
    texts = training_texts(pretrained)
    model = trained(pretrained)
    before = copied(model.model)
    recipe = MonteCLoRA(scale=0.1)
    members = alone(recipe, model, texts)
    p = predicted(members, texts)
    # Samples of lora_A would differ each time.
    again = predicted(members, texts)
    assert torch.equal(again, p)
    of_map = probabilities_of(model, texts)
    assert not torch.equal(of_map, p)
    assert_same(model.model, before)


# --- students -------------------------------------------------------------------------


def test_a_students_loss_is_the_divergence_from_the_mean_of_its_teachers(prepared):
    pretrained = prepared("mrpc", steps=4, learning_rate=1e-2)
    (batch,) = training_texts(pretrained)
    first = trained(pretrained, seed=0)
    second = trained(pretrained, seed=1)
    student = trained(pretrained, seed=2)

    def loss_beside(*teachers):
        recipe = Distilled(teachers)
        loss = recipe.loss(student.logits_model, batch, batch["labels"])
        return loss.item()

    def probabilities(adapted):
        logits = adapted.logits_model(batch).detach()
        return logits.double().softmax(-1)

    p = (probabilities(first) + probabilities(second)) / 2
    q = probabilities(student)
    of_texts = (p * (p / q).log()).sum(-1)
    expected = of_texts.mean().item()
    # Little is left of a difference between numbers in float32 that are nearly equal.
    assert expected > 1e-6
    found = loss_beside(first, second)
    assert found == pytest.approx(expected, rel=1e-3)
    # Nothing is to learn from oneself.
    of_itself = loss_beside(student)
    assert of_itself == pytest.approx(0, abs=1e-6)


def test_a_student_of_an_ensemble_is_one_model(prepared):
    pretrained = prepared("mrpc", steps=2, learning_rate=1e-2)
    texts = training_texts(pretrained)
    model = trained(pretrained)
    members = distilled(model, texts)
    models = list(members.logits())
    assert len(models) == 1
    p = predicted(members, texts)

    recipe = Distilled(ensemble(model))
    assert len(recipe.teachers) == 3
    student = trained_again(model, recipe)
    of_student = probabilities_of(student, texts)
    assert torch.equal(of_student, p)
    teachers = Members.of(recipe.teachers)
    of_ensemble = predicted(teachers, texts)
    assert not torch.equal(of_ensemble, p)
