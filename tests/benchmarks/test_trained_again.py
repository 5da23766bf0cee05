"""Rivals that train again: SWAG, MonteCLoRA, and a student of an ensemble."""

from typing import Any

import pytest
import torch
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
    trained,
    training_texts,
)

SAMPLER = "lora_monteclora_sampler"
"""What is in the names of what PEFT adds to a layer for MonteCLoRA."""

# --- SWAG -----------------------------------------------------------------------------


def test_swags_rate_is_constant_in_the_tail():
    settings = Hyperparameters(
        model="",
        target_modules=(),
        batch_size=1,
        maximum_length=1,
        steps=12,
        warmup_steps=2,
    )
    recipe = SWAG(rate=0.4, tail=0.5, iterates=3)
    paces = [recipe.pace(steps_done, settings) for steps_done in range(12)]
    rising = [0.0, 0.5]
    falling = [1.0, 0.85, 0.7, 0.55]
    tail = [0.4] * 6
    assert paces == pytest.approx(rising + falling + tail)
    assert recipe.kept_steps(settings) == [8, 10, 12]
    # Of a tail of fewer steps each is kept, and a deviation needs two of them.
    assert SWAG(tail=0.25).kept_steps(settings) == [10, 11, 12]
    assert SWAG(tail=0.01).kept_steps(settings) == [11, 12]


def flat(weights) -> torch.Tensor:
    """Join the numbers of weights "a" and "b"."""
    return torch.cat([weights["a"], weights["b"].flatten()])


def test_swags_covariance_is_half_diagonal_and_half_that_of_the_iterates():
    torch.manual_seed(0)
    iterates = []
    for _ in range(4):
        a = torch.randn(2).double()
        b = 2 * torch.randn(1, 2).double()
        iterates.append({"a": a, "b": b})
    rows = torch.stack([flat(weights) for weights in iterates])
    # By NumPy's divisors: the paper's variances have K, its low-rank part has K - 1.
    diagonal = rows.var(0, correction=0).diag()
    expected = (diagonal + rows.mT.cov()) / 2

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
    assert model.retrained is not None
    before = copied(model.model)
    recipe = SWAG(tail=0.5, iterates=4)

    members = of_iterates(recipe, model, texts)

    assert_same(model.model, before)
    again = model.retrained(recipe)
    assert list(again.checkpoints) == [5, 6, 7, 8]
    draws = drawn_logits(members, batch)
    assert draws.std(0).min() > 0
    # The first draw is that of seed 0, around the mean.
    gaussian = Iterates.of(list(again.checkpoints.values()))
    apart = gaussian(torch.Generator().manual_seed(0))
    drawn = {name: gaussian.mean[name] + apart[name] for name in apart}
    again.model.load_state_dict(drawn, strict=False)
    assert_close(draws[0], again.logits_model(batch).detach())


# --- MonteCLoRA -----------------------------------------------------------------------


def penalties_of(model: torch.nn.Module) -> list[Any]:
    """Take PEFT's penalty from each layer, as it stands after a forward pass."""
    penalties = []
    for name, module in model.named_modules():
        if name.endswith(f"{SAMPLER}.default"):
            sampler: Any = module
            penalties.append(sum(sampler.get_variational_loss()))
    return penalties


def test_monteclora_adds_pefts_penalty_to_the_loss(prepared):
    pretrained = prepared("mrpc", learning_rate=1e-2)
    (batch,) = training_texts(pretrained)
    labels = batch["labels"]
    recipe = MonteCLoRA(scale=0.1, divergence=1e-2)
    adapted = trained(pretrained, recipe=recipe)
    adapted.model.train()
    seen = []

    def note(_module, _inputs, output):
        seen.append(output)

    handle = adapted.logits_model.register_forward_hook(note)
    loss = recipe.loss(adapted.logits_model, batch, labels)
    penalties = penalties_of(adapted.model)  # before another pass changes them
    recipe.loss(adapted.logits_model, batch, labels)
    handle.remove()

    assert len(penalties) == 4  # query and value of two layers
    penalty = float(sum(penalties)) / len(penalties)
    assert abs(penalty) > 1e-3
    first, second = seen
    of_data = float(cross_entropy(first, labels))
    assert float(loss) == pytest.approx(of_data + penalty, rel=1e-5)
    # Steps differ in their samples.
    assert not torch.equal(first, second)

    loss.backward()
    weights = adapted.model.named_parameters()
    of_samplers = [weight.grad for name, weight in weights if SAMPLER in name]
    assert len(of_samplers) == 2 * len(penalties)
    for gradient in of_samplers:
        assert gradient is not None
        assert gradient.count_nonzero() > 0


def test_monteclora_predicts_with_lora_a_itself(prepared):
    pretrained = prepared("mrpc", learning_rate=1e-2)
    texts = training_texts(pretrained)
    model = trained(pretrained)
    before = copied(model.model)
    members = alone(MonteCLoRA(scale=0.1), model, texts)
    probabilities = predicted(members, texts)
    # Samples of lora_A would differ each time.
    assert torch.equal(predicted(members, texts), probabilities)
    assert not torch.equal(model.logits(texts).softmax(-1), probabilities)
    assert_same(model.model, before)


# --- students -------------------------------------------------------------------------


def test_a_students_loss_is_the_divergence_from_the_mean_of_its_teachers(prepared):
    pretrained = prepared("mrpc", steps=4, learning_rate=1e-2)
    (batch,) = training_texts(pretrained)
    first = trained(pretrained, seed=0)
    second = trained(pretrained, seed=1)
    student = trained(pretrained, seed=2)

    def loss_of(recipe):
        return float(recipe.loss(student.logits_model, batch, batch["labels"]))

    def probabilities(adapted):
        return adapted.logits_model(batch).detach().double().softmax(-1)

    p = (probabilities(first) + probabilities(second)) / 2
    q = probabilities(student)
    of_classes = p * (p / q).log()
    expected = of_classes.sum(-1).mean().item()
    # Little is left of a difference between numbers in float32 that are nearly equal.
    assert expected > 1e-6
    assert loss_of(Distilled([first, second])) == pytest.approx(expected, rel=1e-3)
    # Nothing is to learn from oneself.
    assert loss_of(Distilled([student])) == pytest.approx(0, abs=1e-6)


def test_a_student_of_an_ensemble_is_one_model(prepared):
    pretrained = prepared("mrpc", steps=2, learning_rate=1e-2)
    texts = training_texts(pretrained)
    model = trained(pretrained)
    assert model.retrained is not None
    members = distilled(model, texts)
    assert len(list(members.logits())) == 1
    probabilities = predicted(members, texts)

    recipe = Distilled(ensemble(model))
    assert len(recipe.teachers) == 3
    student = model.retrained(recipe)
    assert torch.equal(student.logits(texts).softmax(-1), probabilities)
    of_ensemble = predicted(Members.of(recipe.teachers), texts)
    assert not torch.equal(of_ensemble, probabilities)
