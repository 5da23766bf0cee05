"""The regression of learnt variances, against brute force."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext import Moments
from laplace_lora_ext.predictive.amortized import (
    PENALTIES,
    LearntVariance,
    covariances,
    log_variances,
    ridge,
)
from laplace_lora_ext.predictive.links import mean_field
from tests.support.posteriors import normal

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
        return Examples(
            X=self.X[places],
            logs=self.logs[places],
        )

    def learnt(self, noise: float = 0.0) -> LearntVariance:
        """Learn the variances from the features."""
        return LearntVariance.of(
            self.X,
            self.logs,
            prior_precision=ONE,
            curvature_scale=ONE,
            noise=noise,
        )

    def covariance(self) -> Tensor:
        """Compute the covariances `(n, C, C)` that have these variances."""
        variances = self.logs.exp()
        return covariances(variances)


def pairs_of(n_outputs: int) -> int:
    """Count the variances of outputs and of their differences."""
    return n_outputs * (n_outputs + 1) // 2


# --- the ridge regression -------------------------------------------------------------


def weights_of(
    X: Tensor,
    Y: Tensor,
    penalty: Tensor,
) -> Tensor:
    """Regress by least squares of as many more rows as there are features.

    Each asks one weight, times the penalty's root, to be 0.
    """
    n_features = X.shape[1]
    n_outputs = Y.shape[1]
    identity = torch.eye(n_features).double()
    of_penalty = penalty.sqrt() * identity
    zeros = Y.new_zeros(n_features, n_outputs)
    rows = torch.cat([X, of_penalty])
    targets = torch.cat([Y, zeros])
    regression = torch.linalg.lstsq(rows, targets)
    return regression.solution


def by_brute_force(
    X: Tensor,
    Y: Tensor,
    penalty: Tensor,
) -> Tensor:
    """Compute each example's error, by a regression with a free intercept."""
    places = torch.arange(len(X))
    errors = []
    for left_out in places:
        kept = places != left_out
        kept_X = X[kept]
        kept_Y = Y[kept]
        mean_x = kept_X.mean(0)
        mean_y = kept_Y.mean(0)
        weights = weights_of(
            kept_X - mean_x,
            kept_Y - mean_y,
            penalty,
        )
        distance = X[left_out] - mean_x
        predicted = mean_y + distance @ weights
        error = Y[left_out] - predicted
        errors.append(error)
    return torch.stack(errors)


def centred(X: Tensor) -> Tensor:
    return X - X.mean(0)


def collinear_features(n: int) -> Tensor:
    """Draw centred features `(n, 11)`, of which two are sums of others.

    Without a penalty these would have no weights of their own.
    """
    independent = normal(n, 9)
    first_two = independent[:, :2]
    factors = normal(2, 2, seed=1)
    sums = first_two @ factors
    X = torch.cat([independent, sums], dim=1)
    return centred(X)


# Fewer examples than features, and more.
@pytest.mark.parametrize("n", [6, 15, 40])
@pytest.mark.parametrize("noise", [0.1, 3.0])
def test_examples_that_are_left_out_against_as_many_regressions(n, noise):
    X = collinear_features(n)
    true_weights = normal(11, 3, seed=2)
    exact = X @ true_weights
    drawn = normal(n, 3, seed=3)
    Y = centred(exact + noise * drawn)

    # Penalties are relative to the largest eigenvalue of XᵀX.
    singular_values = torch.linalg.svdvals(X)
    largest, *_ = singular_values.square()
    penalties = PENALTIES * largest
    of_penalties = [by_brute_force(X, Y, penalty) for penalty in penalties]
    errors_of = torch.stack(of_penalties)
    losses = errors_of.square().mean((1, 2))
    best = losses.argmin()

    weights, errors = ridge(X, Y)
    expected_errors = errors_of[best]
    # The smallest penalty leaves 1e-10 of the leverage, to which rounding adds up to
    # 1e-15.
    assert_close(errors, expected_errors, rtol=1e-4, atol=1e-6)
    expected = weights_of(X, Y, penalties[best])
    assert_close(weights, expected, rtol=1e-6, atol=1e-8)


# --- variances of outputs and of their differences ------------------------------------


def variances_of_differences(V: Tensor) -> Tensor:
    """Compute the variance `(C, C)` of each two outputs' difference."""
    variances = V.diagonal()
    return variances[:, None] + variances - 2 * V


class NoCovariance:
    """Variances that no three outputs can have, since 3 > 1 + 1.

    Standard deviations of differences obey the triangle inequality.
    """

    of_outputs = torch.tensor(
        [2.0, 3.0, 4.0],
        dtype=torch.float64,
    )
    of_differences = torch.tensor(
        [
            [0.0, 9.0, 1.0],
            [9.0, 0.0, 1.0],
            [1.0, 1.0, 0.0],
        ],
        dtype=torch.float64,
    )

    @staticmethod
    def matrix() -> Tensor:
        """Make what stands for a covariance `(3, 3)`."""
        # Each pair once, in the order of the upper triangle.
        rows, columns = torch.triu_indices(3, 3, offset=1)
        of_pairs = NoCovariance.of_differences[rows, columns]
        learnt = torch.cat([NoCovariance.of_outputs, of_pairs])
        of_one_example = learnt[None]
        (V,) = covariances(of_one_example)
        return V


def test_what_stands_for_no_covariance_is_none():
    V = NoCovariance.matrix()
    # What all outputs share plays no part; the rest has a negative eigenvalue.
    rest = centred(V)
    eigenvalues = torch.linalg.eigvalsh(rest)
    assert eigenvalues.min() < -0.1


def test_variances_are_kept_even_if_no_covariance_has_them():
    V = NoCovariance.matrix()
    assert_close(V.diagonal(), NoCovariance.of_outputs)
    differences = variances_of_differences(V)
    assert_close(differences, NoCovariance.of_differences)


def test_links_see_the_variances_of_differences_even_if_no_covariance_has_them():
    V = NoCovariance.matrix()
    f_mu = normal(3)
    differences = f_mu[:, None] - f_mu
    # MacKay's approximation, for each difference of two logits.
    factor = 1 + torch.pi / 8 * NoCovariance.of_differences
    shrunk = differences / factor.sqrt()
    odds = torch.exp(-shrunk)
    p = 1 / odds.sum(1)
    (log_p,) = mean_field(Moments(f_mu[None], V[None]))
    expected = p / p.sum()
    assert_close(log_p.exp(), expected)


@pytest.fixture(
    params=[1, 2, 5],
    ids="{} outputs".format,
)
def n_outputs(request: pytest.FixtureRequest) -> int:
    return request.param


def test_each_pair_of_outputs_has_a_variance(n_outputs):
    root = normal(4, n_outputs, n_outputs)
    V = root @ root.mT
    logs = log_variances(V)
    n_pairs = pairs_of(n_outputs)
    assert logs.shape == (4, n_pairs)


def test_a_covariance_comes_back_from_its_variances(n_outputs):
    root = normal(4, n_outputs, n_outputs)
    V = root @ root.mT
    logs = log_variances(V)
    found = covariances(logs.exp())
    assert_close(found, V, rtol=1e-12, atol=1e-12)


def test_variances_may_be_zero(n_outputs):
    nothing = torch.zeros(5, n_outputs, n_outputs)
    X = normal(5, 3)
    # The logarithm of 0 is infinite: the smallest number stands for it.
    logs = log_variances(nothing.double())
    learnt = Examples(X, logs).learnt()
    found = learnt.covariance(X)
    largest = found.abs().max()
    assert largest < 1e-300


def test_some_variances_may_be_zero(n_outputs):
    zeros = torch.zeros(5, n_outputs, n_outputs)
    V = zeros.double()
    # Differences from the first output have the same variance, and the others none.
    V[:, 0, 0] = 1
    logs = log_variances(V)
    assert torch.isfinite(logs).all()
    found = covariances(logs.exp())
    assert_close(found, V)


# --- what is learnt -------------------------------------------------------------------


def linear_in_features(
    n_outputs: int = 2,
    seed: int = 1,
) -> Examples:
    """Draw 60 examples, and logarithms of variances that are linear in them."""
    n_pairs = pairs_of(n_outputs)
    standard = normal(60, 7, seed=seed)
    # Neither centred nor scaled, which is for the regression to do.
    X = 3 + 2 * standard
    weights = normal(7, n_pairs, seed=5)
    offset = normal(n_pairs, seed=6)
    # So small that variances are within a few orders of magnitude.
    logs = X @ weights / 10 + offset
    return Examples(X, logs)


@dataclass(frozen=True)
class Learnt:
    """What is learnt from examples of so many outputs."""

    n_outputs: int
    variance: LearntVariance


# Of twelve, 64 components are kept of 78.
@pytest.fixture(
    params=[1, 3, 12],
    ids="{} outputs".format,
)
def linear(request: pytest.FixtureRequest) -> Learnt:
    n_outputs = request.param
    examples = linear_in_features(n_outputs)
    return Learnt(
        n_outputs=n_outputs,
        variance=examples.learnt(),
    )


def test_what_is_linear_in_the_features_is_learnt_exactly(linear):
    learnt = linear.variance
    others = linear_in_features(linear.n_outputs, seed=2)
    # Beyond what it has seen, a learnt variance is cut off.
    below_highest = others.logs < learnt.highest
    above_lowest = others.logs > learnt.lowest
    is_inside = (below_highest & above_lowest).all(1)
    assert is_inside.sum() > 3
    inside = others.at(is_inside)
    found = learnt.covariance(inside.X)
    expected = inside.covariance()
    assert_close(found, expected, **CLOSE)


def test_it_says_that_what_is_linear_is_learnt_exactly(linear):
    learnt = linear.variance
    # Not 1 and 0, for the regression has a penalty.
    assert learnt.r_squared > 1 - 1e-9
    assert learnt.mean_error < 1e-6
    assert learnt.n_examples == 60


def with_noise(
    n: int,
    seed: int,
) -> Examples:
    """Draw features, and logarithms that depend on the first of them.

    Half of their variance is noise, which nobody can know.
    """
    X = normal(n, 5, seed=seed)
    noise = normal(n, 3, seed=seed + 1)
    first = X[:, :1]
    return Examples(X, first + noise)


@dataclass(frozen=True)
class Estimated:
    """What is learnt from noisy examples, and its errors on a great many others."""

    learnt: LearntVariance
    errors: Tensor


@pytest.fixture
def of_noise() -> Estimated:
    learnt = with_noise(80, seed=0).learnt()
    # So many that only the 80 examples above leave an error in what is estimated.
    others = with_noise(20_000, seed=2)
    distances = others.X - learnt.mean
    scaled = distances / learnt.scale
    weights = learnt.weights @ learnt.components
    predicted = learnt.offset + scaled @ weights
    return Estimated(
        learnt=learnt,
        errors=predicted - others.logs,
    )


def test_it_says_how_much_it_explains_of_examples_that_it_leaves_out(of_noise):
    squared_error = of_noise.errors.square().mean()
    # Of the feature and of the noise, 1 each.
    total_variance = 2
    unexplained = squared_error / total_variance
    expected = 1 - unexplained.item()
    found = of_noise.learnt.r_squared
    assert found == pytest.approx(expected, abs=0.12)


def test_it_says_how_far_it_is_off_on_examples_that_it_leaves_out(of_noise):
    expected = of_noise.errors.abs().mean().item()
    found = of_noise.learnt.mean_error
    assert found == pytest.approx(expected, abs=0.1)


def test_the_noise_of_draws_counts_neither_as_explained_nor_as_error():
    examples = with_noise(2_000, seed=0)
    # Of a variance of 2, the feature explains 1, and draws are 0.5.
    learnt = examples.learnt(noise=0.5)
    assert learnt.r_squared == pytest.approx(1 / 1.5, abs=0.04)
    # The mean absolute value of a normal variable of variance 0.5.
    expected = torch.pi**-0.5
    assert learnt.mean_error == pytest.approx(expected, abs=0.02)


def test_it_says_that_noise_alone_cannot_be_learnt():
    noise = Examples(
        X=normal(80, 5, seed=2),
        logs=normal(80, 3, seed=3),
    )
    learnt = noise.learnt()
    # On the examples that it has seen, five features would explain more by chance.
    assert learnt.r_squared < 0.05


@pytest.mark.parametrize("far", [1e6, -1e6])
def test_it_never_goes_more_than_a_factor_of_two_beyond_what_it_has_seen(far):
    examples = linear_in_features()
    learnt = examples.learnt()
    direction = normal(60, 7, seed=4)
    distant = examples.X + far * direction
    covariance = learnt.covariance(distant)
    found = log_variances(covariance)
    above = found - examples.logs.amax(0)
    below = examples.logs.amin(0) - found
    beyond = torch.maximum(above, below)
    # So far off that every variance is at one of its two limits.
    two = torch.full_like(found, 2.0)
    assert_close(beyond, two.log(), rtol=1e-4, atol=1e-4)


def beside(
    X: Tensor,
    value: float,
) -> Tensor:
    """Add a feature that is the same everywhere."""
    constant = torch.full_like(X[:, :1], value)
    return torch.cat([X, constant], dim=1)


def test_a_feature_without_variance_plays_no_part():
    examples = linear_in_features()
    # A mean of sixty times 0.1 is not 0.1 exactly: rounding leaves some variance.
    with_constant = Examples(
        X=beside(examples.X, 0.1),
        logs=examples.logs,
    )
    learnt = with_constant.learnt()
    elsewhere = beside(examples.X, 5.0)
    found = learnt.covariance(elsewhere)
    expected = examples.covariance()
    assert_close(found, expected, **CLOSE)


def test_where_no_feature_varies_every_example_has_the_mean():
    logs = linear_in_features().logs
    alike = Examples(torch.ones(60, 3), logs)
    learnt = alike.learnt()
    four_of_them = torch.ones(4, 3).double()
    found = learnt.covariance(four_of_them)
    mean = logs.mean(0)
    of_mean = covariances(mean.exp())
    expected = of_mean.expand(4, -1, -1)
    assert_close(found, expected)


def test_two_examples_are_too_few():
    numbers = normal(2, 3)
    examples = Examples(X=numbers, logs=numbers)
    message = "from 2 examples that have some: give more"
    with pytest.raises(ValueError, match=message):
        examples.learnt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_example_without_doubt_takes_none_from_others(dtype):
    examples = linear_in_features()
    f_var = examples.covariance().to(dtype)
    f_var[7] = 0
    with_sure = Examples(
        X=examples.X,
        logs=log_variances(f_var),
    )
    learnt = with_sure.learnt()
    assert learnt.n_examples == 59

    is_other = torch.arange(60) != 7
    others = with_sure.at(is_other)
    found = learnt.covariance(others.X)
    expected = others.learnt().covariance(others.X)
    assert_close(found, expected, rtol=0, atol=0)
