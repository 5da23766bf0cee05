"""Rivals that train again: SWAG, MonteCLoRA, and a student of an ensemble."""

import copy
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from benchmarks.fine_tuning import TRAIN, fine_tune
from benchmarks.methods.method import Members, ensemble
from benchmarks.methods.swag import SWAG, Iterates, of_iterates
from benchmarks.methods.trained_again import Distilled, MonteCLoRA, alone, distilled
from benchmarks.training import Hyperparameters


def settings_of(steps, warmup_steps):
    return Hyperparameters(
        model="",
        target_modules=(),
        batch_size=1,
        maximum_length=1,
        steps=steps,
        warmup_steps=warmup_steps,
    )


def test_swags_rate_is_constant_in_the_tail():
    settings = settings_of(steps=12, warmup_steps=2)
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
    gaussian = Iterates.of(iterates)
    assert_close(flat(gaussian.mean), rows.mean(0))
    generator = torch.Generator().manual_seed(0)
    moved = torch.stack([flat(gaussian(generator)) for _ in range(20_000)])
    # By NumPy's divisors: the paper's variances have K, its low-rank part has K - 1.
    diagonal = rows.var(0, correction=0).diag()
    expected = (diagonal + rows.mT.cov()) / 2
    largest_variance = expected.diag().max()
    # Four standard errors, sqrt(2 / 20,000) each, of a variance of 20,000 draws.
    error = (moved.mT.cov() - expected).abs().max()
    assert error / largest_variance < 0.04
    assert moved.mean(0).abs().max() < 0.04 * largest_variance.sqrt()


def test_swag_predicts_around_the_mean_of_its_iterates(prepared):
    pretrained = prepared("mrpc", steps=8, learning_rate=1e-2)
    train = pretrained.data[TRAIN]
    model = fine_tune(pretrained, train, seed=0)
    before = copy.deepcopy(model.model.state_dict())
    recipe = SWAG(tail=0.5, iterates=4)
    loader = pretrained.loader(train, batch_size=8)
    members = of_iterates(recipe, model, loader)
    after = model.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert model.retrained is not None
    trained = model.retrained(recipe)
    assert list(trained.checkpoints) == [5, 6, 7, 8]
    batch = next(iter(loader))
    logits = [logits_of(batch).detach() for logits_of in members.logits()]
    draws = torch.stack(logits)
    assert draws.std(0).min() > 0
    gaussian = Iterates.of(list(trained.checkpoints.values()))
    apart = gaussian(torch.Generator().manual_seed(0))
    weights = {name: gaussian.mean[name] + apart[name] for name in apart}
    trained.model.load_state_dict(weights, strict=False)
    assert_close(draws[0], trained.logits_model(batch).detach())


def test_monteclora_adds_pefts_penalty_to_the_loss(prepared):
    pretrained = prepared("mrpc", learning_rate=1e-2)
    train = pretrained.data[TRAIN]
    recipe = MonteCLoRA(scale=0.1, divergence=1e-2)
    adapted = fine_tune(pretrained, train, 0, recipe)
    batch = next(iter(pretrained.loader(train)))
    seen = []

    def note(_module, _inputs, output):
        seen.append(output)

    adapted.model.train()
    handle = adapted.logits_model.register_forward_hook(note)
    loss = recipe.loss(adapted.logits_model, batch, batch["labels"])
    penalties = []
    for name, module in adapted.model.named_modules():
        if name.endswith("lora_monteclora_sampler.default"):
            sampler: Any = module
            penalties.append(sum(sampler.get_variational_loss()))
    recipe.loss(adapted.logits_model, batch, batch["labels"])
    handle.remove()
    assert len(penalties) == 4  # query and value of two layers
    penalty = float(sum(penalties)) / len(penalties)
    assert abs(penalty) > 1e-3
    first, second = seen
    data = float(cross_entropy(first, batch["labels"]))
    assert float(loss) == pytest.approx(data + penalty, rel=1e-5)
    # Steps differ in their samples.
    assert not torch.equal(first, second)
    loss.backward()
    of_samplers = [
        weight.grad
        for name, weight in adapted.model.named_parameters()
        if "lora_monteclora_sampler" in name
    ]
    assert len(of_samplers) == 2 * len(penalties)
    for gradient in of_samplers:
        assert gradient is not None
        assert gradient.count_nonzero() > 0


def test_monteclora_predicts_with_lora_a_itself(prepared):
    pretrained = prepared("mrpc", learning_rate=1e-2)
    train = pretrained.data[TRAIN]
    model = fine_tune(pretrained, train, seed=0)
    before = copy.deepcopy(model.model.state_dict())
    loader = pretrained.loader(train, batch_size=8)
    members = alone(MonteCLoRA(scale=0.1), model, loader)
    predicted = members.predict({TRAIN: loader})[TRAIN]
    assert torch.equal(members.predict({TRAIN: loader})[TRAIN], predicted)
    assert not torch.equal(model.logits(loader).softmax(-1), predicted)
    after = model.model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_students_loss_is_the_divergence_from_the_mean_of_its_teachers(prepared):
    pretrained = prepared("mrpc", steps=4, learning_rate=1e-2)
    train = pretrained.data[TRAIN]
    teachers = [fine_tune(pretrained, train, seed) for seed in (0, 1)]
    student = fine_tune(pretrained, train, seed=2)
    batch = next(iter(pretrained.loader(train)))
    loss = Distilled(teachers).loss(student.logits_model, batch, batch["labels"])

    def probabilities(adapted):
        return adapted.logits_model(batch).detach().double().softmax(-1)

    first, second = teachers
    p = (probabilities(first) + probabilities(second)) / 2
    q = probabilities(student)
    by_hand = (p * (p / q).log()).sum(-1).mean()
    assert by_hand > 1e-6
    assert float(loss) == pytest.approx(float(by_hand), rel=1e-3)
    # Nothing is to learn from oneself.
    of_itself = Distilled([student]).loss(student.logits_model, batch, batch["labels"])
    assert float(of_itself) == pytest.approx(0, abs=1e-6)


def test_a_student_of_an_ensemble_is_one_model(prepared):
    pretrained = prepared("mrpc", steps=2, learning_rate=1e-2)
    train = pretrained.data[TRAIN]
    model = fine_tune(pretrained, train, seed=0)
    loader = pretrained.loader(train, batch_size=8)
    members = distilled(model, loader)
    assert len(list(members.logits())) == 1
    predicted = members.predict({TRAIN: loader})[TRAIN]
    recipe = Distilled(ensemble(model))
    assert len(recipe.teachers) == 3
    assert model.retrained is not None
    student = model.retrained(recipe)
    assert torch.equal(student.logits(loader).softmax(-1), predicted)
    of_ensemble = Members.of(recipe.teachers)
    assert not torch.equal(of_ensemble.predict({TRAIN: loader})[TRAIN], predicted)
