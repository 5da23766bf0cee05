"""The regression behind learnt variances, against brute force and against covariances."""

import pytest
import torch

from laplace_lora_ext.predictive.amortized import (
    PENALTIES,
    LearntVariance,
    covariances,
    log_variances,
    ridge,
)
from laplace_lora_ext.predictive.links import mean_field
from tests.support.posteriors import generator

ONE = torch.ones(1).double()


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def weights_of(X, Y, penalty):
    """By least squares of as many more rows as there are features."""
    n_features = X.shape[1]
    rows = torch.cat([X, penalty.sqrt() * torch.eye(n_features).double()])
    return torch.linalg.lstsq(rows, torch.cat([Y, Y.new_zeros(n_features, Y.shape[1])])).solution


def by_brute_force(X, Y, penalty):
    """Errors of each example, by as many regressions with a free intercept as there are."""
    errors = []
    for n in range(len(X)):
        rest = torch.arange(len(X)) != n
        x, y = X[rest] - X[rest].mean(0), Y[rest] - Y[rest].mean(0)
        errors.append(Y[n] - Y[rest].mean(0) - (X[n] - X[rest].mean(0)) @ weights_of(x, y, penalty))
    return torch.stack(errors)


@pytest.mark.parametrize("n", [6, 15, 40])  # fewer examples than features, and more
@pytest.mark.parametrize("noise", [0.1, 3.0])
def test_examples_that_are_left_out_against_as_many_regressions(n, noise):
    X = randn(n, 9)
    X = torch.cat([X, X[:, :2] @ randn(2, 2, seed=1)], dim=1)  # collinear
    X = X - X.mean(0)
    Y = X @ randn(11, 3, seed=2) + noise * randn(n, 3, seed=3)
    Y = Y - Y.mean(0)
    largest = torch.linalg.svdvals(X)[0].square()
    by_penalty = {p: by_brute_force(X, Y, p) for p in PENALTIES * largest}
    best = min(by_penalty, key=lambda p: by_penalty[p].square().mean())
    weights, errors = ridge(X, Y)
    # The smallest penalty leaves 1e-10 of the leverage, to which rounding adds up to 1e-15.
    torch.testing.assert_close(errors, by_penalty[best], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weights, weights_of(X, Y, best), rtol=1e-6, atol=1e-8)


def test_links_see_the_variances_of_differences_even_if_no_covariance_has_them():
    D = torch.tensor([[0.0, 9.0, 1.0], [9.0, 0.0, 1.0], [1.0, 1.0, 0.0]]).double()  # 3 > 1 + 1
    own = torch.tensor([2.0, 3.0, 4.0]).double()
    pairs = torch.cat([own, torch.stack([D[0, 1], D[0, 2], D[1, 2]])])
    V = covariances(pairs[None])
    assert torch.linalg.eigvalsh(V - V.mean(1, keepdim=True)).min() < -0.1
    found = V.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(found[0], own)
    torch.testing.assert_close(found[:, :, None] + found[:, None] - 2 * V, D[None])
    f_mu = randn(1, 3)
    shrunk = (f_mu[0, :, None] - f_mu[0]) / (1 + torch.pi / 8 * D).sqrt()
    p = 1 / (-shrunk).exp().sum(1)
    torch.testing.assert_close(mean_field(f_mu, V).exp()[0], p / p.sum())


def linear_in_features(n: int, n_outputs: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features, and logarithms of variances that are linear in them."""
    X = 3 + 2 * randn(n, 7, seed=seed)
    n_pairs = n_outputs * (n_outputs + 1) // 2
    return X, X @ randn(7, n_pairs, seed=5) / 10 + randn(n_pairs, seed=6)


@pytest.mark.parametrize("n_outputs", [1, 3, 12])  # of twelve, 64 components are kept of 78
def test_what_is_linear_in_the_features_is_learnt_exactly(n_outputs):
    learnt = LearntVariance.of(*linear_in_features(60, n_outputs, seed=1), ONE, ONE)
    X, logs = linear_in_features(60, n_outputs, seed=2)
    inside = ((logs < learnt.highest) & (logs > learnt.lowest)).all(1)
    assert inside.sum() > 3
    found = learnt.covariance(X[inside])
    torch.testing.assert_close(found, covariances(logs[inside].exp()), rtol=1e-6, atol=1e-6)
    assert learnt.r_squared > 1 - 1e-9
    assert learnt.mean_error < 1e-6
    assert learnt.n_examples == 60


def test_it_says_how_good_it_is_on_examples_that_it_leaves_out():
    X = randn(80, 5)
    Y = X[:, :1] + randn(80, 3, seed=1)  # half of the variance can't be known
    learnt = LearntVariance.of(X, Y, ONE, ONE)
    X, Y = randn(20_000, 5, seed=2), randn(20_000, 3, seed=3)
    errors = learnt.offset + (X - learnt.mean) / learnt.scale @ learnt.weights @ learnt.components
    errors = errors - X[:, :1] - Y
    assert abs(learnt.r_squared - (1 - errors.square().mean().item() / 2)) < 0.12
    assert abs(learnt.mean_error - errors.abs().mean().item()) < 0.1
    assert LearntVariance.of(X[:80], Y[:80], ONE, ONE).r_squared < 0.05  # nothing can be known


def test_it_never_goes_more_than_a_factor_of_two_beyond_what_it_has_seen():
    X, logs = linear_in_features(60, 2, seed=1)
    learnt = LearntVariance.of(X, logs, ONE, ONE)
    for far in (1e6, -1e6):
        found = log_variances(learnt.covariance(X + far * randn(60, 7, seed=4)))
        beyond = torch.maximum(found - logs.amax(0), logs.amin(0) - found)
        torch.testing.assert_close(beyond, torch.full_like(found, 2.0).log(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n_outputs", [1, 2, 5])
def test_a_covariance_comes_back_from_its_variances_and_may_be_zero(n_outputs):
    root = randn(4, n_outputs, n_outputs)
    V = root @ root.mT
    logs = log_variances(V)
    assert logs.shape == (4, n_outputs * (n_outputs + 1) // 2)
    torch.testing.assert_close(covariances(logs.exp()), V, rtol=1e-12, atol=1e-12)
    V = torch.zeros(5, n_outputs, n_outputs).double()
    learnt = LearntVariance.of(randn(5, 3), log_variances(V), ONE, ONE)
    assert learnt.covariance(randn(5, 3)).abs().max() < 1e-300
    V[:, 0, 0] = 1  # differences from it have the same variance, and the others none
    assert torch.isfinite(log_variances(V)).all()
    torch.testing.assert_close(covariances(log_variances(V).exp()), V)


def test_features_without_variance_play_no_part():
    X, logs = linear_in_features(60, 2, seed=1)
    learnt = LearntVariance.of(torch.cat([X, torch.full((60, 1), 0.1)], dim=1), logs, ONE, ONE)
    more, expected = torch.cat([X, 5 * torch.ones(60, 1)], dim=1), covariances(logs.exp())
    torch.testing.assert_close(learnt.covariance(more), expected, rtol=1e-6, atol=1e-6)
    without = LearntVariance.of(torch.ones(60, 3), logs, ONE, ONE)
    expected = covariances(logs.mean(0).exp()).expand(4, -1, -1)
    torch.testing.assert_close(without.covariance(torch.ones(4, 3).double()), expected)
    with pytest.raises(ValueError, match="from 2 examples: give more"):
        LearntVariance.of(randn(2, 3), randn(2, 3), ONE, ONE)
