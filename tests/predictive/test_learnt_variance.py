"""The regression of learnt variances, against brute force."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext.predictive.learnt_variance import (
    PENALTIES,
    LearntVariance,
    covariances,
    log_variances,
    ridge,
)
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
    logs = log_variances(nothing)
    assert_close(covariances(logs.exp()), nothing)
    # As little as rounding leaves, and not so much less that it tells features apart.
    assert logs.min() >= math.log(torch.finfo(torch.float64).eps)


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


def test_what_nobody_can_know_is_not_explained_and_the_noise_of_draws_no_error():
    # Of a variance of 2, the feature explains 1, and draws are 0.5.
    X = normal(2_000, 5)
    # Of more pairs than components are kept of.
    with_noise = Examples(X, X[:, :1] + normal(2_000, 78, seed=1))
    learnt = with_noise.learnt(noise=0.5)
    # What they scatter is no range of the variances.
    assert learnt.highest.max() < 1.2 * X[:, 0].max()
    assert learnt.r_squared == pytest.approx(1 / 1.5, abs=0.04)
    # The mean absolute value of a normal variable of variance 0.5.
    assert learnt.mean_error == pytest.approx(torch.pi**-0.5, abs=0.02)
    learnt = with_noise.learnt()
    assert learnt.r_squared == pytest.approx(1 / 2, abs=0.04)
    # And of variance 1.
    assert learnt.mean_error == pytest.approx((2 / torch.pi) ** 0.5, abs=0.02)
    # Less than the noise is none.
    assert linear_in_features().learnt(noise=0.1).mean_error == 0
    # Examples that it has seen would be explained better.
    few = with_noise.at(torch.arange(12))
    _, errors = ridge(centred(few.X) / few.X.std(0, correction=0), centred(few.logs))
    assert few.learnt().mean_error == pytest.approx(errors.abs().mean().item())


def test_it_never_goes_more_than_a_factor_of_two_beyond_what_it_has_seen():
    examples = linear_in_features()
    distant = examples.X + 1e6 * normal(60, 7, seed=4)
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


def test_an_example_without_doubt_takes_none_from_others():
    examples = linear_in_features()
    f_var = examples.covariance().float()
    f_var[7] = 0
    # Of one logit alone nothing is in doubt here.
    f_var[5, 0] = f_var[5, :, 0] = 0
    with_sure = Examples(examples.X, log_variances(f_var))
    learnt = with_sure.learnt()
    assert learnt.n_examples == 59
    others = with_sure.at(torch.arange(60) != 7)
    assert torch.equal(learnt.offset, others.learnt().offset)
    with pytest.raises(ValueError, match="from 2 examples"):
        with_sure.at(torch.arange(5, 8)).learnt()
