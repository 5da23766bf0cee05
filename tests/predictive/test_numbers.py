"""Predictions of numbers, against independent integrals."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm
from torch.testing import assert_close

from laplace_lora_ext import LaplaceMixture, NumberPrediction
from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import STRUCTURES, fitted, normal, plain_regression
from tests.test_mixture import preferences, two

LEVELS = [0.01, 0.3, 0.5, 0.95]
# What `plain_regression` is fitted with.
NOISE_VARIANCE = 0.5**2


def variances_of(f_var: torch.Tensor) -> torch.Tensor:
    """Take variances `(N, outputs)` out of covariances."""
    return f_var.diagonal(dim1=1, dim2=2)


# --- a posterior's --------------------------------------------------------------------


@pytest.fixture(params=STRUCTURES)
def regression(request: pytest.FixtureRequest):
    """A posterior of each structure with two outputs, and inputs."""
    return plain_regression(2, request.param)


def test_a_posterior_predicts_normal_targets(regression):
    la, X = regression
    f_mu, f_var = la(X)
    prediction = la.predict([X[:5], X[5:]])
    assert isinstance(prediction, NumberPrediction)
    variance = variances_of(f_var)
    total_variance = variance + NOISE_VARIANCE
    assert_close(prediction.mean, f_mu)
    assert_close(prediction.epistemic_std, variance.sqrt())
    assert_close(prediction.total_std, total_variance.sqrt())


@pytest.mark.parametrize("level", LEVELS)
def test_quantiles_are_a_normal_distributions(regression, level):
    la, X = regression
    prediction = la.predict(X)
    z = norm.ppf(level)
    expected = prediction.mean + z * prediction.total_std
    assert_close(prediction.quantile(level), expected)


def test_an_interval_leaves_as_much_below_as_above(regression):
    la, X = regression
    prediction = la.predict(X)
    low, high = prediction.interval(0.8)
    assert_close(low, prediction.quantile(0.1))
    assert_close(high, prediction.quantile(0.9))


def assert_alike(
    found: NumberPrediction,
    expected: NumberPrediction,
) -> None:
    for part, of_expected in zip(found, expected, strict=True):
        assert_close(part, of_expected)


def test_moments_are_predicted_from_as_batches_are():
    la, X = plain_regression()
    found = la.predict(la.predictive_moments(X))
    assert_alike(found, la.predict(X))


def test_rows_are_predicted_from_as_batches_are():
    la, X = plain_regression()
    found = la.predict(
        list(X),
        collate_fn=torch.stack,
        batch_size=5,
    )
    assert_alike(found, la.predict(X))


def test_learnt_variances_predict_numbers():
    la, X = plain_regression()
    la.amortize([X])
    f_mu, f_var = la(X, pred_type="amortized")
    prediction = la.predict(X, pred_type="amortized")
    assert_close(prediction.mean, f_mu)
    variance = variances_of(f_var)
    assert_close(prediction.epistemic_std, variance.sqrt())


def test_rewards_have_no_noise():
    la = fitted(
        batches=preferences(),
        model=lora_model("bert", n_labels=1),
        likelihood="reward_modeling",
    )
    batch = ragged_batches()[0]
    prediction = la.predict(batch)
    f_mu, f_var = la(batch)
    assert_close(prediction.mean, f_mu)
    variance = variances_of(f_var)
    assert_close(prediction.total_std, variance.sqrt())
    assert torch.equal(prediction.total_std, prediction.epistemic_std)


# --- a mixture's ----------------------------------------------------------------------


@dataclass(frozen=True)
class Mixed:
    """A mixture of two regressions, their noises apart, and what each predicts."""

    mixture: LaplaceMixture
    batch: Any
    first: NumberPrediction
    second: NumberPrediction
    together: NumberPrediction


@pytest.fixture
def mixed() -> Mixed:
    both = two("numbers")
    both.first.sigma_noise = 0.2
    both.second.sigma_noise = 0.6
    (batch,) = both.batches
    mixture = both.mixture()
    return Mixed(
        mixture=mixture,
        batch=batch,
        first=both.first.predict(batch),
        second=both.second.predict(batch),
        together=mixture.predict(batch),
    )


def test_a_mixtures_variance_is_that_of_predictions_and_the_mean_of_noises(mixed):
    f_mu, f_var = mixed.mixture(mixed.batch)
    variance = variances_of(f_var)
    noise_variance = (0.2**2 + 0.6**2) / 2
    total_variance = variance + noise_variance
    assert_close(mixed.together.mean, f_mu)
    assert_close(mixed.together.epistemic_std, variance.sqrt())
    assert_close(mixed.together.total_std, total_variance.sqrt())


@pytest.mark.parametrize("level", LEVELS)
def test_below_a_mixtures_quantile_lies_as_much_of_its_members(mixed, level):
    x = mixed.together.quantile(level)
    of_members = []
    for member in (mixed.first, mixed.second):
        below = norm.cdf(x, member.mean, member.total_std)
        of_members.append(below)
    found = np.mean(of_members, axis=0)
    np.testing.assert_allclose(found, level, rtol=1e-9)


def test_a_mixtures_density_is_the_mean_of_its_members(mixed):
    y = mixed.batch["labels"].double()
    of_first = mixed.first.log_density(y).exp()
    of_second = mixed.second.log_density(y).exp()
    expected = (of_first + of_second) / 2
    assert_close(mixed.together.log_density(y), expected.log())


# --- scores of predictions ------------------------------------------------------------


def some_numbers(n_members: int) -> tuple[NumberPrediction, torch.Tensor]:
    """Make predictions of two numbers for three examples, and targets."""
    means = normal(n_members, 3, 2, seed=0)
    roots = normal(n_members, 3, 2, 2, seed=1)
    covariances = roots @ roots.mT
    members = list(zip(means, covariances, strict=True))
    noises = [0.3] * n_members
    prediction = NumberPrediction.of(members, noises)
    targets = 2 * normal(3, 2, seed=2)
    return prediction, targets


def ranked_probability_score(
    means: np.ndarray,
    stds: np.ndarray,
    target: float,
) -> float:
    """Integrate a mixture's squared distance from the target's step."""

    def squared(x: float) -> float:
        below = norm.cdf(x, means, stds).mean()
        step = x >= target
        return (below - step) ** 2

    # In two parts, as the integrand jumps at the target.
    below, _ = quad(squared, -40, target)
    above, _ = quad(squared, target, 40)
    return below + above


@pytest.mark.parametrize("n_members", [1, 3])
def test_the_ranked_probability_score_is_its_integral(n_members):
    prediction, targets = some_numbers(n_members)
    found = prediction.crps(targets)
    for row, column in np.ndindex(3, 2):
        expected = ranked_probability_score(
            prediction.means[row, :, column].numpy(),
            prediction.stds[row, :, column].numpy(),
            targets[row, column].item(),
        )
        assert found[row, column].item() == pytest.approx(expected, rel=1e-6)


def test_a_sure_prediction_has_its_absolute_error():
    f_mu = torch.zeros(1, 1).double()
    f_var = torch.zeros(1, 1, 1).double()
    noise = 1e-9
    prediction = NumberPrediction.of([(f_mu, f_var)], [noise])
    target = f_mu + 3
    assert_close(prediction.crps(target), torch.full_like(f_mu, 3.0))


@pytest.mark.parametrize("level", [-0.1, 0.0, 1.0])
def test_levels_outside_of_0_and_1_are_refused(level):
    prediction, _ = some_numbers(1)
    with pytest.raises(ValueError, match="level must be between 0 and 1"):
        prediction.quantile(level)
    with pytest.raises(ValueError, match="coverage must be between 0 and 1"):
        prediction.interval(level)
