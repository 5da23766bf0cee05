"""The regression of learnt variances, against brute force."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_lora_ext import from_pretrained
from laplace_lora_ext.models.batches import Swapping
from laplace_lora_ext.predictive.amortized import (
    PENALTIES,
    LearntVariance,
    changes_of_logits,
    covariances,
    log_variances,
    ridge,
)
from laplace_lora_ext.predictive.posterior import drawn_functions
from tests.support.models import (
    lora_model,
    plain_model,
    ragged_batches,
    with_lora,
    without_labels,
)
from tests.support.posteriors import (
    count_forward_passes,
    fitted,
    generator,
    make,
    normal,
    plain_regression,
    some_precision,
)
from tests.support.snapshots import Snapshot, half_trained
from tests.support.texts import fitted_text

# How exactly it is learnt what can be: the regression has a penalty.
CLOSE = {"rtol": 1e-6, "atol": 1e-6}

# A prior precision and a scale of the curvature, which these tests do not vary.
ONE = torch.ones(1).double()


@dataclass(frozen=True)
class Examples:
    """Features `(n, d)` of examples, and logarithms of their variances."""

    X: Tensor
    logs: Tensor

    def at(self, places: Tensor) -> Examples:
        """Take some of the examples."""
        return Examples(self.X[places], self.logs[places])

    def learnt(self, noise: float = 0.0) -> LearntVariance:
        """Learn the variances from the features."""
        return LearntVariance.of(self.X, self.logs, ONE, ONE, noise)

    def covariance(self) -> Tensor:
        """Compute the covariances `(n, C, C)` that have these variances."""
        return covariances(self.logs.exp())


def pairs_of(n_outputs: int) -> int:
    """Count the variances of outputs and of their differences."""
    return n_outputs * (n_outputs + 1) // 2


# --- the ridge regression -------------------------------------------------------------


def weights_of(X: Tensor, Y: Tensor, penalty: Tensor) -> Tensor:
    """Regress by least squares of as many more rows as there are features.

    Each asks one weight, times the penalty's root, to be 0.
    """
    of_penalty = penalty.sqrt() * torch.eye(X.shape[1]).double()
    rows = torch.cat([X, of_penalty])
    targets = torch.cat([Y, Y.new_zeros(X.shape[1], Y.shape[1])])
    return torch.linalg.lstsq(rows, targets).solution


def by_brute_force(X: Tensor, Y: Tensor, penalty: Tensor) -> Tensor:
    """Compute each example's error, by a regression with a free intercept."""
    places = torch.arange(len(X))
    errors = []
    for left_out in places:
        kept = places != left_out
        mean_x, mean_y = X[kept].mean(0), Y[kept].mean(0)
        weights = weights_of(X[kept] - mean_x, Y[kept] - mean_y, penalty)
        errors.append(Y[left_out] - mean_y - (X[left_out] - mean_x) @ weights)
    return torch.stack(errors)


def centred(X: Tensor) -> Tensor:
    return X - X.mean(0)


# Fewer examples than features, and more.
@pytest.mark.parametrize(("n", "noise"), [(6, 3.0), (15, 0.1), (40, 3.0)])
def test_examples_that_are_left_out_against_as_many_regressions(n, noise):
    # Two of eleven features are sums of others: without a penalty these would have no
    # weights of their own.
    independent = normal(n, 9)
    sums = independent[:, :2] @ normal(2, 2, seed=1)
    X = centred(torch.cat([independent, sums], dim=1))
    Y = centred(X @ normal(11, 3, seed=2) + noise * normal(n, 3, seed=3))

    # Penalties are relative to the largest eigenvalue of XᵀX.
    penalties = PENALTIES * torch.linalg.svdvals(X)[0].square()
    errors_of = torch.stack([by_brute_force(X, Y, penalty) for penalty in penalties])
    best = errors_of.square().mean((1, 2)).argmin()

    weights, errors = ridge(X, Y)
    # The smallest penalty leaves 1e-10 of the leverage, to which rounding adds up to
    # 1e-15.
    assert_close(errors, errors_of[best], rtol=1e-4, atol=1e-6)
    assert_close(weights, weights_of(X, Y, penalties[best]), rtol=1e-6, atol=1e-8)


# --- variances of outputs and of their differences ------------------------------------


@pytest.mark.parametrize("n_outputs", [1, 5])
def test_a_covariance_comes_back_from_its_variances(n_outputs):
    root = normal(4, n_outputs, n_outputs)
    V = root @ root.mT
    logs = log_variances(V)
    assert logs.shape == (4, pairs_of(n_outputs))
    assert_close(covariances(logs.exp()), V, rtol=1e-12, atol=1e-12)

    nothing = torch.zeros(5, n_outputs, n_outputs).double()
    X = normal(5, 3)
    # The logarithm of 0 is infinite: the smallest number stands for it.
    learnt = Examples(X, log_variances(nothing)).learnt()
    assert learnt.covariance(X).abs().max() < 1e-300
    # Differences from the first output have the same variance, and the others none.
    nothing[:, 0, 0] = 1
    assert_close(covariances(log_variances(nothing).exp()), nothing)


# --- what is learnt -------------------------------------------------------------------


def linear_in_features(n_outputs: int = 2, seed: int = 1) -> Examples:
    """Draw 60 examples, and logarithms of variances that are linear in them."""
    n_pairs = pairs_of(n_outputs)
    # Neither centred nor scaled, which is for the regression to do.
    X = 3 + 2 * normal(60, 7, seed=seed)
    # So small that variances are within a few orders of magnitude.
    logs = X @ normal(7, n_pairs, seed=5) / 10 + normal(n_pairs, seed=6)
    return Examples(X, logs)


# Of twelve, 64 components are kept of 78.
@pytest.mark.parametrize("n_outputs", [1, 12])
def test_what_is_linear_in_the_features_is_learnt_exactly(n_outputs):
    learnt = linear_in_features(n_outputs).learnt()
    # Not 1 and 0, for the regression has a penalty.
    assert learnt.r_squared > 1 - 1e-9
    assert learnt.mean_error < 1e-6
    assert learnt.n_examples == 60
    others = linear_in_features(n_outputs, seed=2)
    # Beyond what it has seen, a learnt variance is cut off.
    is_inside = (others.logs < learnt.highest) & (others.logs > learnt.lowest)
    inside = others.at(is_inside.all(1))
    assert len(inside.X) > 3
    assert_close(learnt.covariance(inside.X), inside.covariance(), **CLOSE)


def with_noise(n: int, seed: int) -> Examples:
    """Draw features, and logarithms that depend on the first of them.

    Half of their variance is noise, which nobody can know.
    """
    X = normal(n, 5, seed=seed)
    return Examples(X, X[:, :1] + normal(n, 3, seed=seed + 1))


def test_it_says_how_much_it_explains_of_examples_that_it_leaves_out():
    learnt = with_noise(80, seed=0).learnt()
    # So many that only the 80 examples above leave an error in what is estimated.
    others = with_noise(20_000, seed=2)
    scaled = (others.X - learnt.mean) / learnt.scale
    predicted = learnt.offset + scaled @ learnt.weights @ learnt.components
    errors = predicted - others.logs
    # Of a variance of 2: 1 each of the feature and of the noise.
    expected = 1 - errors.square().mean().item() / 2
    assert learnt.r_squared == pytest.approx(expected, abs=0.12)
    assert learnt.mean_error == pytest.approx(errors.abs().mean().item(), abs=0.1)
    # Noise alone cannot be learnt. On the examples that it has seen, five features
    # would explain more by chance.
    learnt = Examples(normal(80, 5, seed=2), normal(80, 3, seed=3)).learnt()
    assert learnt.r_squared < 0.05


def test_the_noise_of_draws_counts_neither_as_explained_nor_as_error():
    # Of a variance of 2, the feature explains 1, and draws are 0.5.
    learnt = with_noise(2_000, seed=0).learnt(noise=0.5)
    assert learnt.r_squared == pytest.approx(1 / 1.5, abs=0.04)
    # The mean absolute value of a normal variable of variance 0.5.
    assert learnt.mean_error == pytest.approx(torch.pi**-0.5, abs=0.02)


@pytest.mark.parametrize("far", [1e6, -1e6])
def test_it_never_goes_more_than_a_factor_of_two_beyond_what_it_has_seen(far):
    examples = linear_in_features()
    distant = examples.X + far * normal(60, 7, seed=4)
    found = log_variances(examples.learnt().covariance(distant))
    above = found - examples.logs.amax(0)
    below = examples.logs.amin(0) - found
    # So far off that every variance is at one of its two limits.
    two = torch.full_like(found, 2.0)
    assert_close(torch.maximum(above, below), two.log(), rtol=1e-4, atol=1e-4)


def beside(X: Tensor, value: float) -> Tensor:
    """Add a feature that is the same everywhere."""
    return torch.cat([X, torch.full_like(X[:, :1], value)], dim=1)


def test_a_feature_without_variance_plays_no_part():
    examples = linear_in_features()
    X = beside(examples.X, 0.1)
    # Rounding leaves some variance.
    X[::2, -1] += 1.4e-17
    assert X[:, -1].std() > 0
    learnt = Examples(X, examples.logs).learnt()
    found = learnt.covariance(beside(examples.X, 5.0))
    assert_close(found, examples.covariance(), **CLOSE)
    # Where none varies every example has the mean.
    learnt = Examples(torch.ones(60, 3), examples.logs).learnt()
    of_mean = covariances(examples.logs.mean(0, keepdim=True).exp())
    found = learnt.covariance(torch.ones(4, 3).double())
    assert_close(found, of_mean.expand(4, -1, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_example_without_doubt_takes_none_from_others(dtype):
    examples = linear_in_features()
    f_var = examples.covariance().to(dtype)
    f_var[7] = 0
    with_sure = Examples(examples.X, log_variances(f_var))
    learnt = with_sure.learnt()
    assert learnt.n_examples == 59
    others = with_sure.at(torch.arange(60) != 7)
    assert torch.equal(learnt.offset, others.learnt().offset)
    with pytest.raises(ValueError, match="from 2 examples"):
        with_sure.at(torch.arange(5, 8)).learnt()


LINKS = ["mean_field", "probit", "mc", "bridge"]
AMORTIZED = {"pred_type": "amortized"}


@pytest.fixture
def amortized():
    """A posterior of a classifier that has learnt its variances from its batches."""
    la = fitted()
    la.amortize(ragged_batches())
    return la


@pytest.fixture
def batch():
    """The first of the batches that posteriors are fitted to."""
    return ragged_batches()[0]


@pytest.fixture
def forbid_backward_passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function from whose call on a backward pass fails."""

    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("a backward pass")

    def forbid() -> None:
        monkeypatch.setattr(torch.autograd, "grad", fail)

    return forbid


# --- against exact predictions --------------------------------------------------------


class Exponential(nn.Module):
    """Has logits' variances proportional to exp(2 x_0), the layer's input.

    Their logarithms are thus linear in the head's inputs, of which x_0 is one.
    """

    def __init__(self, n_outputs: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.head = nn.Linear(9, n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        constant = self.layer(torch.ones_like(x))
        first = x[:, :1]
        z = first.exp() * constant
        features = torch.cat([x, z], dim=1)
        return self.head(features)


def inputs(n: int, seed: int, spread: float = 1.0) -> Tensor:
    """Draw numbers between minus and plus the spread."""
    draws = generator(seed)
    uniform = torch.rand(n, 5, generator=draws).double()
    around_zero = 2 * uniform - 1
    return spread * around_zero


def exponential(
    structure: str = "lowrank_kron", likelihood: str = "classification", **keywords: Any
):
    """Fit a posterior, and let it learn variances that its features tell exactly."""
    model = with_lora(Exponential(), "layer")
    la = make(model, structure, likelihood, **keywords)
    y = torch.arange(40) % 3
    if likelihood == "regression":
        y = nn.functional.one_hot(y).double()
    X = inputs(40, seed=1)
    la.fit([(X, y)])
    first = inputs(40, seed=2)
    second = inputs(40, seed=3)
    la.amortize([first, second])
    return la


@pytest.fixture
def points() -> Tensor:
    """Inputs within what is learnt from, beyond which variances are cut off."""
    return inputs(20, seed=4, spread=0.9)


@pytest.mark.parametrize("structure", ["lowrank_kron", "full"])
def test_variances_that_are_linear_in_the_features_predict_exactly(structure, points):
    la = exponential(structure)
    # Not 1, for the regression has a penalty.
    assert la.learnt_variance.r_squared > 1 - 1e-8
    of_map = la.model(points).softmax(-1)
    moments = la.predictive_moments(points)
    for link in LINKS:
        # With the same noise each time.
        found = la(points, link_approx=link, generator=generator(), **AMORTIZED)
        exact = la(moments, link_approx=link, generator=generator())
        assert_close(found, exact, rtol=1e-5, atol=1e-5)
        # Without a variance there would be an error.
        assert (exact - of_map).abs().max() > 0.01
    found = la.predict(points, generator=generator(), **AMORTIZED)
    expected = la.predict(points, generator=generator())
    # Entropies that are differences of others keep fewer digits.
    assert_close(tuple(found), tuple(expected), rtol=1e-3, atol=1e-5)


def test_regression_has_a_mean_and_a_covariance(points):
    la = exponential(likelihood="regression", sigma_noise=0.7)
    mean, covariance = la(points, **AMORTIZED)
    f_mu, f_var = la(points)
    assert_close(mean, f_mu, rtol=1e-5, atol=1e-6)
    assert_close(covariance, f_var, rtol=1e-5, atol=1e-6)
    # And targets their noise.
    found, exact = la.predict(points, **AMORTIZED), la.predict(points)
    assert_close(tuple(found), tuple(exact), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="no covariance between examples"):
        la(points, joint=True, **AMORTIZED)


def test_variances_that_fit_no_covariance_give_the_nearest_one():
    la, X = plain_regression()
    # Numbers have no swapped copies.
    assert la.amortize([X]).n_examples == 12
    # Of outputs with a variance of 1 each, no difference has more than 4.
    logs = torch.tensor([1.0, 1.0, 10.0]).double().log()
    learnt = la.learnt_variance
    la.learnt_variance = replace(
        learnt,
        weights=torch.zeros_like(learnt.weights),
        offset=logs,
        lowest=logs,
        highest=logs,
    )
    _, f_var = la(X, **AMORTIZED)
    # Of [[1, -4], [-4, 1]], without its eigenvalue of -3.
    expected = torch.tensor([[2.5, -2.5], [-2.5, 2.5]]).double()
    assert_close(f_var, expected.expand_as(f_var))
    deviations = la.predict(X, **AMORTIZED).epistemic_std
    assert_close(deviations.square(), f_var.diagonal(dim1=1, dim2=2))


# --- their price ----------------------------------------------------------------------


def test_a_prediction_is_one_forward_pass(amortized, batch, forbid_backward_passes):
    la = amortized
    forbid_backward_passes()
    passes = count_forward_passes(la)
    for link in LINKS:
        assert not la(batch, link_approx=link, **AMORTIZED).requires_grad
    la.predict(batch, **AMORTIZED)
    assert len(passes) == len(LINKS) + 1


# --- many outputs ---------------------------------------------------------------------


def test_changes_of_logits_are_those_of_the_linearised_model(batch):
    la = fitted()
    drawn = la.sample(4, generator())
    found = changes_of_logits(la, batch, drawn)
    linearised = drawn_functions(la, drawn, "glm", batch)
    expected = linearised - la.predictive_moments(batch).f_mu
    # Found are central differences: rounding and curvature leave an error.
    assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_many_outputs_learn_from_draws(points, forbid_backward_passes):
    n_outputs = 18  # more than are learnt from exact covariances
    la = make(with_lora(Exponential(n_outputs), "layer"), prior_precision=20.0)
    la.fit([(inputs(40, seed=1), torch.arange(40) % n_outputs)])
    la.n_contrasts = n_outputs
    exact = la(points, link_approx="mean_field")
    of_map = la.model(points).softmax(-1)
    unlabelled = [inputs(4, seed=seed) for seed in range(100)]
    forbid_backward_passes()
    passes = count_forward_passes(la)
    learnt = la.amortize(unlabelled, None)
    # One at the weights and two at each of eight draws, whatever the number of classes.
    assert len(passes) == 17 * len(unlabelled)
    assert torch.equal(la.amortize(unlabelled, None).weights, learnt.weights)
    # The noise of the draws, without which it is 0.83, is not the features' fault.
    assert learnt.r_squared > 0.95
    found = la(points, link_approx="mean_field", **AMORTIZED)
    errors = (found - exact).abs()
    assert errors.mean() < 0.2 * (of_map - exact).abs().mean()


# --- what it learns from --------------------------------------------------------------


def test_it_learns_from_each_text_and_a_copy_by_a_generator():
    la = fitted()
    batches = ragged_batches()
    assert la.amortize(batches, None).n_examples == 8
    before = torch.get_rng_state()
    one = la.amortize(batches)
    assert one.n_examples == 16
    assert torch.equal(la.amortize(batches).offset, one.offset)
    assert torch.equal(torch.get_rng_state(), before)
    other = la.amortize(batches, generator=generator(1))
    assert not torch.equal(one.offset, other.offset)
    # Copies are learnt from as texts of one's own, as texts without labels are.
    swapped = Swapping(batches, la.model.transformer, generator(1))
    more = [swapped(batch) for batch in batches]
    both = la.amortize([*batches, *more], None)
    unlabelled = la.amortize(batches, [without_labels(each) for each in more])
    # A principal component may have either sign.
    for learnt in (other, unlabelled):
        assert_close(learnt.weights.abs(), both.weights.abs())
    # What was learnt last is kept.
    assert la.learnt_variance is unlabelled


# --- what it belongs to ---------------------------------------------------------------


def test_it_belongs_to_a_fit_and_a_prior(amortized, batch):
    expected = amortized(batch, **AMORTIZED)
    hyperparameters = amortized.hyperparameters
    for name, value in [
        ("prior_precision", 2.0),
        ("prior_precision", some_precision(amortized, "layerwise")),
        ("temperature", 2.0),
    ]:
        setattr(amortized, name, value)
        for predict in (amortized, amortized.predict):
            with pytest.raises(ValueError, match="The prior has changed since"):
                predict(batch, **AMORTIZED)
        amortized.hyperparameters = hyperparameters
        amortized.temperature = 1.0
    # It serves again with its own.
    assert torch.equal(amortized(batch, **AMORTIZED), expected)
    amortized.fit(ragged_batches())
    with pytest.raises(ValueError, match=r"No variance is learnt .*la\.amortize"):
        amortized.predict(batch, **AMORTIZED)
    amortized.blocks[0].weight.data.mul_(2)
    for use in (
        partial(amortized, batch, **AMORTIZED),
        partial(amortized.amortize, []),
    ):
        with pytest.raises(RuntimeError, match="weights"):
            use()


# --- what is refused ------------------------------------------------------------------

PACKED = {
    "input_ids": torch.ones(1, 4).long(),
    "position_ids": torch.tensor([[0, 1, 0, 1]]),
}


def rewards() -> Any:
    return make(lora_model("bert", n_labels=1), likelihood="reward_modeling")


# What is tried with a posterior and its batches.
REFUSED = [
    (lambda la, _: la.amortize([]), "no data"),
    (lambda la, batches: la.amortize([batches[0], PACKED], None), "batch 1: .*packed"),
    (
        lambda la, batches: la.amortize(batches, "shuffled"),
        "unlabelled .shuffled. is none",
    ),
    (lambda la, _: la(PACKED, **AMORTIZED), "packed"),
    (
        lambda la, batches: la(la.predictive_moments(batches[0]), **AMORTIZED),
        "no inputs",
    ),
    (lambda la, batches: la.predict(batches[0], pred_type="nn"), "pred_type"),
    (lambda *_: make(plain_model()).amortize([inputs(4, seed=1)]), "fit"),
    (lambda _, batches: fitted_text().amortize(batches), "not language_modeling"),
    (lambda _, batches: rewards().amortize(batches), "not reward_modeling"),
]


REFUSALS = (ValueError, AttributeError, NotImplementedError)


@pytest.mark.parametrize(("use", "message"), REFUSED)
def test_what_is_refused_leaves_the_model_and_what_was_learnt(use, message):
    model = half_trained(lora_model("bert"))
    la = fitted(model=model)
    batches = ragged_batches()
    learnt = la.amortize(batches)
    before = Snapshot(model)
    with pytest.raises(REFUSALS, match=message):
        use(la, batches)
    assert la.learnt_variance is learnt
    # Some refusals make a model of their own first, by draws.
    before.assert_equal(model, random_state=False)


# --- files ----------------------------------------------------------------------------


def test_it_is_saved_with_the_posterior(amortized, batch, tmp_path):
    amortized.save_pretrained(tmp_path)
    loaded = from_pretrained(lora_model("bert"), tmp_path)
    assert_close(loaded(batch, **AMORTIZED), amortized(batch, **AMORTIZED))
    r_squared = amortized.learnt_variance.r_squared
    assert loaded.learnt_variance.r_squared == r_squared
    # A state without learnt variances removes them.
    state = fitted().state_dict()
    assert state["learnt_variance"] is None
    loaded.load_state_dict(state)
    assert loaded.learnt_variance is None
