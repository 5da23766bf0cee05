"""The regression of learnt variances, against brute force."""

from dataclasses import dataclass

import pytest
import torch
from torch.testing import assert_close

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


def learnt_from(
    X: torch.Tensor,
    logs: torch.Tensor,
) -> LearntVariance:
    """Learn logarithms of variances from features."""
    return LearntVariance.of(
        X,
        logs,
        prior_precision=ONE,
        curvature_scale=ONE,
    )


def pairs_of(n_outputs: int) -> int:
    """Count the variances of outputs and of their differences."""
    return n_outputs * (n_outputs + 1) // 2


# --- the ridge regression -------------------------------------------------------------


def weights_of(
    X: torch.Tensor,
    Y: torch.Tensor,
    penalty: torch.Tensor,
) -> torch.Tensor:
    """Regress by least squares of as many more rows as there are features.

    Each asks one weight, times the penalty's root, to be 0.
    """
    n_features = X.shape[1]
    n_outputs = Y.shape[1]
    of_penalty = penalty.sqrt() * torch.eye(n_features).double()
    zeros = Y.new_zeros(n_features, n_outputs)
    rows = torch.cat([X, of_penalty])
    targets = torch.cat([Y, zeros])
    return torch.linalg.lstsq(rows, targets).solution


def by_brute_force(
    X: torch.Tensor,
    Y: torch.Tensor,
    penalty: torch.Tensor,
) -> torch.Tensor:
    """Compute each example's error, by a regression with a free intercept."""
    errors = []
    for left_out in range(len(X)):
        kept = torch.arange(len(X)) != left_out
        mean_x = X[kept].mean(0)
        mean_y = Y[kept].mean(0)
        centred_X = X[kept] - mean_x
        centred_Y = Y[kept] - mean_y
        weights = weights_of(centred_X, centred_Y, penalty)
        distance = X[left_out] - mean_x
        predicted = mean_y + distance @ weights
        errors.append(Y[left_out] - predicted)
    return torch.stack(errors)


def centred(X: torch.Tensor) -> torch.Tensor:
    return X - X.mean(0)


def collinear_features(n: int) -> torch.Tensor:
    """Draw centred features `(n, 11)`, of which two are sums of others.

    Without a penalty these would have no weights of their own.
    """
    independent = normal(n, 9)
    first_two = independent[:, :2]
    sums = first_two @ normal(2, 2, seed=1)
    X = torch.cat([independent, sums], dim=1)
    return centred(X)


# Fewer examples than features, and more.
@pytest.mark.parametrize("n", [6, 15, 40])
@pytest.mark.parametrize("noise", [0.1, 3.0])
def test_examples_that_are_left_out_against_as_many_regressions(n, noise):
    X = collinear_features(n)
    true_weights = normal(11, 3, seed=2)
    exact = X @ true_weights
    drawn = noise * normal(n, 3, seed=3)
    Y = centred(exact + drawn)

    # Penalties are relative to the largest eigenvalue of XᵀX.
    largest, *_ = torch.linalg.svdvals(X).square()
    penalties = PENALTIES * largest
    errors_of = []
    losses = []
    for penalty in penalties:
        of_penalty = by_brute_force(X, Y, penalty)
        errors_of.append(of_penalty)
        losses.append(of_penalty.square().mean().item())
    best = losses.index(min(losses))

    weights, errors = ridge(X, Y)
    # The smallest penalty leaves 1e-10 of the leverage, to which rounding adds up to
    # 1e-15.
    assert_close(errors, errors_of[best], rtol=1e-4, atol=1e-6)
    expected = weights_of(X, Y, penalties[best])
    assert_close(weights, expected, rtol=1e-6, atol=1e-8)


# --- variances of outputs and of their differences ------------------------------------


def variances_of_differences(V: torch.Tensor) -> torch.Tensor:
    """Compute the variance `(C, C)` of each two outputs' difference."""
    variances = V.diagonal()
    return variances[:, None] + variances - 2 * V


class NoCovariance:
    """Variances that no three outputs can have, since 3 > 1 + 1.

    Standard deviations of differences obey the triangle inequality.
    """

    of_outputs = torch.tensor([2.0, 3.0, 4.0]).double()
    of_differences = torch.tensor(
        [
            [0.0, 9.0, 1.0],
            [9.0, 0.0, 1.0],
            [1.0, 1.0, 0.0],
        ]
    ).double()

    @staticmethod
    def matrix() -> torch.Tensor:
        """Make what stands for a covariance `(3, 3)`."""
        # Each pair once, in the order of the upper triangle.
        above_diagonal = torch.ones(3, 3).triu(diagonal=1).bool()
        of_pairs = NoCovariance.of_differences[above_diagonal]
        learnt = torch.cat([NoCovariance.of_outputs, of_pairs])
        (V,) = covariances(learnt[None])
        return V


def test_variances_are_kept_even_if_no_covariance_has_them():
    V = NoCovariance.matrix()
    # What all outputs share plays no part; the rest has a negative eigenvalue.
    smallest = torch.linalg.eigvalsh(centred(V)).min()
    assert smallest < -0.1
    assert_close(V.diagonal(), NoCovariance.of_outputs)
    assert_close(variances_of_differences(V), NoCovariance.of_differences)


def test_links_see_the_variances_of_differences_even_if_no_covariance_has_them():
    V = NoCovariance.matrix()
    f_mu = normal(3)
    differences = f_mu[:, None] - f_mu
    # MacKay's approximation, for each difference of two logits.
    factor = 1 + torch.pi / 8 * NoCovariance.of_differences
    shrunk = differences / factor.sqrt()
    p = 1 / (-shrunk).exp().sum(1)
    (log_p,) = mean_field(f_mu[None], V[None])
    assert_close(log_p.exp(), p / p.sum())


@pytest.fixture(params=[1, 2, 5], ids="{} outputs".format)
def n_outputs(request: pytest.FixtureRequest) -> int:
    return request.param


def test_a_covariance_comes_back_from_its_variances(n_outputs):
    root = normal(4, n_outputs, n_outputs)
    V = root @ root.mT
    logs = log_variances(V)
    assert logs.shape == (4, pairs_of(n_outputs))
    found = covariances(logs.exp())
    assert_close(found, V, rtol=1e-12, atol=1e-12)


def test_variances_may_be_zero(n_outputs):
    nothing = torch.zeros(5, n_outputs, n_outputs)
    # The logarithm of 0 is infinite: the smallest number stands for it.
    logs = log_variances(nothing.double())
    learnt = learnt_from(normal(5, 3), logs)
    found = learnt.covariance(normal(5, 3))
    assert found.abs().max() < 1e-300


def test_some_variances_may_be_zero(n_outputs):
    V = torch.zeros(5, n_outputs, n_outputs).double()
    # Differences from the first output have the same variance, and the others none.
    V[:, 0, 0] = 1
    logs = log_variances(V)
    assert torch.isfinite(logs).all()
    assert_close(covariances(logs.exp()), V)


# --- what is learnt -------------------------------------------------------------------


def linear_in_features(
    n_outputs: int = 2,
    seed: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw 60 examples, and logarithms of variances that are linear in them."""
    n_pairs = pairs_of(n_outputs)
    # Neither centred nor scaled, which is for the regression to do.
    X = 3 + 2 * normal(60, 7, seed=seed)
    # So small that variances are within a few orders of magnitude.
    weights = normal(7, n_pairs, seed=5) / 10
    offset = normal(n_pairs, seed=6)
    return X, X @ weights + offset


@dataclass(frozen=True)
class Learnt:
    """What is learnt from examples of so many outputs."""

    n_outputs: int
    variance: LearntVariance


# Of twelve, 64 components are kept of 78.
@pytest.fixture(params=[1, 3, 12], ids="{} outputs".format)
def linear(request: pytest.FixtureRequest) -> Learnt:
    X, logs = linear_in_features(request.param)
    return Learnt(request.param, learnt_from(X, logs))


def test_what_is_linear_in_the_features_is_learnt_exactly(linear):
    learnt = linear.variance
    X, logs = linear_in_features(linear.n_outputs, seed=2)
    # Beyond what it has seen, a learnt variance is cut off.
    is_inside = (logs < learnt.highest) & (logs > learnt.lowest)
    inside = is_inside.all(1)
    assert inside.sum() > 3
    found = learnt.covariance(X[inside])
    expected = covariances(logs[inside].exp())
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw features, and logarithms that depend on the first of them.

    Half of their variance is noise, which nobody can know.
    """
    X = normal(n, 5, seed=seed)
    noise = normal(n, 3, seed=seed + 1)
    first = X[:, :1]
    return X, first + noise


def test_it_says_how_good_it_is_on_examples_that_it_leaves_out():
    learnt = learnt_from(*with_noise(80, seed=0))

    # So many that only the 80 examples above leave an error in what is estimated.
    new_X, new_logs = with_noise(20_000, seed=2)
    scaled = (new_X - learnt.mean) / learnt.scale
    predicted = learnt.offset + scaled @ learnt.weights @ learnt.components
    errors = predicted - new_logs
    # Of the feature and of the noise, 1 each.
    total_variance = 2
    r_squared = 1 - errors.square().mean().item() / total_variance
    assert learnt.r_squared == pytest.approx(r_squared, abs=0.12)
    mean_error = errors.abs().mean().item()
    assert learnt.mean_error == pytest.approx(mean_error, abs=0.1)


def test_it_says_that_noise_alone_cannot_be_learnt():
    X = normal(80, 5, seed=2)
    noise = normal(80, 3, seed=3)
    learnt = learnt_from(X, noise)
    # On the examples that it has seen, five features would explain more by chance.
    assert learnt.r_squared < 0.05


@pytest.mark.parametrize("far", [1e6, -1e6])
def test_it_never_goes_more_than_a_factor_of_two_beyond_what_it_has_seen(far):
    X, logs = linear_in_features()
    learnt = learnt_from(X, logs)
    distant = X + far * normal(60, 7, seed=4)
    covariance = learnt.covariance(distant)
    found = log_variances(covariance)
    above = found - logs.amax(0)
    below = logs.amin(0) - found
    beyond = torch.maximum(above, below)
    # So far off that every variance is at one of its two limits.
    log_of_two = torch.full_like(found, 2.0).log()
    assert_close(beyond, log_of_two, rtol=1e-4, atol=1e-4)


def beside(
    X: torch.Tensor,
    value: float,
) -> torch.Tensor:
    """Add a feature that is the same everywhere."""
    constant = torch.full((len(X), 1), value)
    return torch.cat([X, constant], dim=1)


def test_a_feature_without_variance_plays_no_part():
    X, logs = linear_in_features()
    # A mean of sixty times 0.1 is not 0.1 exactly: rounding leaves some variance.
    learnt = learnt_from(beside(X, 0.1), logs)
    found = learnt.covariance(beside(X, 5.0))
    expected = covariances(logs.exp())
    assert_close(found, expected, **CLOSE)


def test_where_no_feature_varies_every_example_has_the_mean():
    _, logs = linear_in_features()
    learnt = learnt_from(torch.ones(60, 3), logs)
    found = learnt.covariance(torch.ones(4, 3).double())
    of_mean = covariances(logs.mean(0).exp())
    assert_close(found, of_mean.expand(4, -1, -1))


def test_two_examples_are_too_few():
    message = "from 2 examples that have some: give more"
    with pytest.raises(ValueError, match=message):
        learnt_from(normal(2, 3), normal(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_example_without_doubt_takes_none_from_others(dtype):
    X, logs = linear_in_features()
    f_var = covariances(logs.exp()).to(dtype)
    f_var[7] = 0
    others = torch.arange(60) != 7

    logs = log_variances(f_var)
    learnt = learnt_from(X, logs)
    assert learnt.n_examples == 59
    without = learnt_from(X[others], logs[others])
    found = learnt.covariance(X[others])
    expected = without.covariance(X[others])
    assert_close(found, expected, rtol=0, atol=0)
