"""The regression of learnt variances, against brute force."""

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
from tests.support.posteriors import generator

# A prior precision and a temperature, which these tests do not vary.
ONE = torch.ones(1).double()


def randn(
    *shape: int,
    seed: int = 0,
) -> torch.Tensor:
    return torch.randn(
        *shape,
        generator=generator(seed),
        dtype=torch.float64,
    )


def learnt_from(
    X: torch.Tensor,
    logs: torch.Tensor,
) -> LearntVariance:
    return LearntVariance.of(X, logs, ONE, ONE)


def pairs_of(n_outputs: int) -> int:
    """Count the variances of outputs and of their differences."""
    return n_outputs * (n_outputs + 1) // 2


# --- the ridge regression -------------------------------------------------------------


def weights_of(
    X: torch.Tensor,
    Y: torch.Tensor,
    penalty: torch.Tensor,
) -> torch.Tensor:
    """Regress by least squares of as many more rows as there are features."""
    n_features = X.shape[1]
    n_outputs = Y.shape[1]
    rows_of_penalty = penalty.sqrt() * torch.eye(n_features).double()
    rows = torch.cat([X, rows_of_penalty])
    targets = torch.cat([Y, Y.new_zeros(n_features, n_outputs)])
    return torch.linalg.lstsq(rows, targets).solution


def by_brute_force(
    X: torch.Tensor,
    Y: torch.Tensor,
    penalty: torch.Tensor,
) -> torch.Tensor:
    """Compute each example's error, by a regression with a free intercept."""
    errors = []
    for n in range(len(X)):
        rest = torch.arange(len(X)) != n
        mean_x = X[rest].mean(0)
        mean_y = Y[rest].mean(0)
        weights = weights_of(X[rest] - mean_x, Y[rest] - mean_y, penalty)
        predicted = mean_y + (X[n] - mean_x) @ weights
        errors.append(Y[n] - predicted)
    return torch.stack(errors)


def centred(X: torch.Tensor) -> torch.Tensor:
    return X - X.mean(0)


@pytest.mark.parametrize("n", [6, 15, 40])  # fewer examples than features, and more
@pytest.mark.parametrize("noise", [0.1, 3.0])
def test_examples_that_are_left_out_against_as_many_regressions(n, noise):
    independent = randn(n, 9)
    # Without a penalty these would have no weights of their own.
    collinear = independent[:, :2] @ randn(2, 2, seed=1)
    X = centred(torch.cat([independent, collinear], dim=1))
    true_weights = randn(11, 3, seed=2)
    Y = centred(X @ true_weights + noise * randn(n, 3, seed=3))

    largest = torch.linalg.svdvals(X)[0].square()
    penalties = PENALTIES * largest
    errors_of = [by_brute_force(X, Y, penalty) for penalty in penalties]
    losses = [of_penalty.square().mean().item() for of_penalty in errors_of]
    best = losses.index(min(losses))

    weights, errors = ridge(X, Y)
    # The smallest penalty leaves 1e-10 of the leverage, to which rounding adds up to
    # 1e-15.
    assert_close(errors, errors_of[best], rtol=1e-4, atol=1e-6)
    expected = weights_of(X, Y, penalties[best])
    assert_close(weights, expected, rtol=1e-6, atol=1e-8)


# --- variances of outputs and of their differences ------------------------------------


def test_links_see_the_variances_of_differences_even_if_no_covariance_has_them():
    # Standard deviations of differences obey the triangle inequality, and 3 > 1 + 1.
    of_pairs = [
        [0.0, 9.0, 1.0],
        [9.0, 0.0, 1.0],
        [1.0, 1.0, 0.0],
    ]
    D = torch.tensor(of_pairs).double()
    of_outputs = torch.tensor([2.0, 3.0, 4.0]).double()
    # Each pair once, in the order of the upper triangle.
    above_diagonal = torch.ones(3, 3).triu(diagonal=1).bool()
    learnt = torch.cat([of_outputs, D[above_diagonal]])
    (V,) = covariances(learnt[None])

    # What all outputs share plays no part; the rest has a negative eigenvalue.
    assert torch.linalg.eigvalsh(centred(V)).min() < -0.1
    variances = V.diagonal()
    assert_close(variances, of_outputs)
    assert_close(variances[:, None] + variances - 2 * V, D)

    f_mu = randn(3)
    differences = f_mu[:, None] - f_mu
    shrunk = differences / (1 + torch.pi / 8 * D).sqrt()
    p = 1 / (-shrunk).exp().sum(1)
    (log_p,) = mean_field(f_mu[None], V[None])
    assert_close(log_p.exp(), p / p.sum())


@pytest.mark.parametrize("n_outputs", [1, 2, 5])
def test_a_covariance_comes_back_from_its_variances_and_may_be_zero(n_outputs):
    root = randn(4, n_outputs, n_outputs)
    V = root @ root.mT
    logs = log_variances(V)
    assert logs.shape == (4, pairs_of(n_outputs))
    assert_close(covariances(logs.exp()), V, rtol=1e-12, atol=1e-12)

    # The logarithm of 0 is infinite: the smallest number stands for it.
    nothing = torch.zeros(5, n_outputs, n_outputs).double()
    learnt = learnt_from(randn(5, 3), log_variances(nothing))
    assert learnt.covariance(randn(5, 3)).abs().max() < 1e-300

    # Differences from the first output have the same variance, and the others none.
    of_first = nothing.clone()
    of_first[:, 0, 0] = 1
    logs = log_variances(of_first)
    assert torch.isfinite(logs).all()
    assert_close(covariances(logs.exp()), of_first)


# --- what is learnt -------------------------------------------------------------------


def linear_in_features(
    n_outputs: int = 2,
    seed: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw 60 examples, and logarithms of variances that are linear in them."""
    n_pairs = pairs_of(n_outputs)
    X = 3 + 2 * randn(60, 7, seed=seed)
    weights = randn(7, n_pairs, seed=5) / 10
    offset = randn(n_pairs, seed=6)
    return X, X @ weights + offset


# Of twelve, 64 components are kept of 78.
@pytest.mark.parametrize("n_outputs", [1, 3, 12])
def test_what_is_linear_in_the_features_is_learnt_exactly(n_outputs):
    X, logs = linear_in_features(n_outputs)
    learnt = learnt_from(X, logs)
    new_X, new_logs = linear_in_features(n_outputs, seed=2)
    # Beyond what it has seen, a learnt variance is cut off.
    is_inside = (new_logs < learnt.highest) & (new_logs > learnt.lowest)
    inside = is_inside.all(1)
    assert inside.sum() > 3
    found = learnt.covariance(new_X[inside])
    expected = covariances(new_logs[inside].exp())
    assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert learnt.r_squared > 1 - 1e-9
    assert learnt.mean_error < 1e-6
    assert learnt.n_examples == 60


def test_it_says_how_good_it_is_on_examples_that_it_leaves_out():
    X = randn(80, 5)
    noise = randn(80, 3, seed=1)
    # Half of the variance is the noise's, which nobody can know.
    learnt = learnt_from(X, X[:, :1] + noise)

    # So many that only the 80 examples above leave an error in what is estimated.
    new_X = randn(20_000, 5, seed=2)
    new_noise = randn(20_000, 3, seed=3)
    scaled = (new_X - learnt.mean) / learnt.scale
    predicted = learnt.offset + scaled @ learnt.weights @ learnt.components
    errors = predicted - (new_X[:, :1] + new_noise)
    total_variance = 2
    r_squared = 1 - errors.square().mean().item() / total_variance
    assert learnt.r_squared == pytest.approx(r_squared, abs=0.12)
    mean_error = errors.abs().mean().item()
    assert learnt.mean_error == pytest.approx(mean_error, abs=0.1)

    # Of noise alone nothing can be known.
    of_noise = learnt_from(new_X[:80], new_noise[:80])
    assert of_noise.r_squared < 0.05


def test_it_never_goes_more_than_a_factor_of_two_beyond_what_it_has_seen():
    X, logs = linear_in_features()
    learnt = learnt_from(X, logs)
    for far in (1e6, -1e6):
        distant = X + far * randn(60, 7, seed=4)
        found = log_variances(learnt.covariance(distant))
        above = found - logs.amax(0)
        below = logs.amin(0) - found
        beyond = torch.maximum(above, below)
        # So far off that every variance is at one of its two limits.
        log_of_two = torch.full_like(found, 2.0).log()
        assert_close(beyond, log_of_two, rtol=1e-4, atol=1e-4)


def test_features_without_variance_play_no_part():
    X, logs = linear_in_features()
    # A mean of sixty times 0.1 is not 0.1 exactly: rounding leaves some variance.
    constant = torch.full((60, 1), 0.1)
    learnt = learnt_from(torch.cat([X, constant], dim=1), logs)
    elsewhere = torch.full((60, 1), 5.0)
    found = learnt.covariance(torch.cat([X, elsewhere], dim=1))
    expected = covariances(logs.exp())
    assert_close(found, expected, rtol=1e-6, atol=1e-6)

    of_constants = learnt_from(torch.ones(60, 3), logs)
    found = of_constants.covariance(torch.ones(4, 3).double())
    # What is constant tells nothing: every example has the mean.
    of_mean = covariances(logs.mean(0).exp())
    assert_close(found, of_mean.expand(4, -1, -1))


def test_two_examples_are_too_few():
    with pytest.raises(ValueError, match="from 2 examples that have some: give more"):
        learnt_from(randn(2, 3), randn(2, 3))


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
