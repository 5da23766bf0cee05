"""Rivals that train again: SWAG, MonteCLoRA, and a student of an ensemble."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from benchmarks.methods.method import Members, ensemble
from benchmarks.methods.swag import SWAG, Iterates, of_iterates
from benchmarks.methods.trained_again import Distilled, MonteCLoRA, alone, distilled
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


def four_iterates():
    """Draw two weights four times, of which the second varies twice as much."""
    torch.manual_seed(0)
    return [
        {"a": torch.randn(2).double(), "b": 2 * torch.randn(1, 2).double()}
        for _ in range(4)
    ]


def flat(weights) -> Tensor:
    """Join the numbers of weights "a" and "b"."""
    return torch.cat([weights["a"], weights["b"].flatten()])


def test_swags_covariance_is_half_diagonal_and_half_that_of_the_iterates():
    iterates = four_iterates()
    rows = torch.stack([flat(weights) for weights in iterates])
    # By NumPy's divisors: the paper's variances have K, its low-rank part has K - 1.
    variances = rows.var(0, correction=0)
    covariance = rows.mT.cov()
    expected = (variances.diag() + covariance) / 2

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


def test_monteclora_adds_pefts_penalty_and_learns_what_it_samples_by(prepared):
    pretrained = prepared("mrpc", learning_rate=1e-2)
    (batch,) = training_texts(pretrained)
    labels = batch["labels"]
    recipe = MonteCLoRA(scale=0.1, divergence=1e-2)
    adapted = trained(pretrained, recipe=recipe)
    adapted.model.train()
    logits_model = adapted.logits_model
    seen: list[Tensor] = []

    def note(_module, _inputs, output: Tensor) -> None:
        seen.append(output)

    with logits_model.register_forward_hook(note):
        loss = recipe.loss(logits_model, batch, labels)
        # Before another pass changes them.
        penalties = [
            float(sum(module.get_variational_loss()))
            for name, module in adapted.model.named_modules()
            if name.endswith(f"{SAMPLER}.default")
        ]
        recipe.loss(logits_model, batch, labels)

    assert len(penalties) == 4  # query and value of two layers
    penalty = sum(penalties) / len(penalties)
    assert abs(penalty) > 1e-3
    first, second = seen
    expected = cross_entropy(first, labels).item() + penalty
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    # Steps differ in their samples.
    assert not torch.equal(first, second)

    loss.backward()
    named = adapted.model.named_parameters()
    gradients = [weight.grad for name, weight in named if SAMPLER in name]
    # Two weights of each sampler.
    assert len(gradients) == 2 * 4
    assert all(gradient.count_nonzero() > 0 for gradient in gradients)


def test_monteclora_predicts_with_lora_a_itself(prepared):
    pretrained = prepared("mrpc", learning_rate=1e-2)
    texts = training_texts(pretrained)
    model = trained(pretrained)
    before = copied(model.model)
    recipe = MonteCLoRA(scale=0.1)
    members = alone(recipe, model, texts)
    p = predicted(members, texts)
    # Samples of lora_A would differ each time.
    assert torch.equal(predicted(members, texts), p)
    assert not torch.equal(probabilities_of(model, texts), p)
    assert_same(model.model, before)


# --- students -------------------------------------------------------------------------


def test_a_students_loss_is_the_divergence_from_the_mean_of_its_teachers(prepared):
    pretrained = prepared("mrpc", steps=4, learning_rate=1e-2)
    (batch,) = training_texts(pretrained)
    first, second, student = (trained(pretrained, seed) for seed in range(3))

    def loss_beside(*teachers):
        recipe = Distilled(teachers)
        return recipe.loss(student.logits_model, batch, batch["labels"]).item()

    def probabilities(adapted):
        return adapted.logits_model(batch).detach().double().softmax(-1)

    p = (probabilities(first) + probabilities(second)) / 2
    q = probabilities(student)
    expected = (p * (p / q).log()).sum(-1).mean().item()
    # Little is left of a difference between numbers in float32 that are nearly equal.
    assert expected > 1e-6
    assert loss_beside(first, second) == pytest.approx(expected, rel=1e-3)
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
    student = trained_again(model, recipe)
    assert torch.equal(probabilities_of(student, texts), p)
    assert not torch.equal(predicted(Members.of(recipe.teachers), texts), p)
