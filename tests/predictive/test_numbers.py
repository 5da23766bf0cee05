"""Predictions of numbers, against independent integrals."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext import LaplaceMixture, NumberPrediction
from tests.support.models import first_batch, lora_model
from tests.support.posteriors import (
    STRUCTURES,
    fitted,
    normal,
    plain_regression,
)
from tests.support.tasks import preferences, two

# The tails, the middle, and one between.
LEVELS = [0.01, 0.3, 0.5, 0.95]
# What `plain_regression` is fitted with.
NOISE_VARIANCE = 0.5**2


def variances_of(f_var: Tensor) -> Tensor:
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
    prediction = la.predict(X)
    assert isinstance(prediction, NumberPrediction)
    variance = variances_of(f_var)
    total_variance = variance + NOISE_VARIANCE
    total_std = total_variance.sqrt()
    assert_close(prediction.mean, f_mu)
    assert_close(prediction.epistemic_std, variance.sqrt())
    assert_close(prediction.total_std, total_std)


def test_batches_are_predicted_one_after_another(regression):
    la, X = regression
    batches = [X[:5], X[5:]]
    found = la.predict(batches)
    expected = la.predict(X)
    assert_alike(found, expected)


@pytest.mark.parametrize("level", LEVELS)
def test_quantiles_are_a_normal_distributions(regression, level):
    la, X = regression
    prediction = la.predict(X)
    z = norm.ppf(level)
    deviation = z * prediction.total_std
    expected = prediction.mean + deviation
    found = prediction.quantile(level)
    assert_close(found, expected)


def test_an_interval_leaves_as_much_below_as_above(regression):
    la, X = regression
    prediction = la.predict(X)
    low, high = prediction.interval(0.8)
    tenth = prediction.quantile(0.1)
    nine_tenths = prediction.quantile(0.9)
    assert_close(low, tenth)
    assert_close(high, nine_tenths)


def assert_alike(
    found: NumberPrediction,
    expected: NumberPrediction,
) -> None:
    for part, of_expected in zip(found, expected, strict=True):
        assert_close(part, of_expected)


def test_moments_are_predicted_from_as_batches_are():
    la, X = plain_regression()
    moments = la.predictive_moments(X)
    found = la.predict(moments)
    expected = la.predict(X)
    assert_alike(found, expected)


def test_rows_are_predicted_from_as_batches_are():
    la, X = plain_regression()
    # As a data set gives them, one by one.
    found = la.predict(
        list(X),
        collate_fn=torch.stack,
        batch_size=5,
    )
    expected = la.predict(X)
    assert_alike(found, expected)


def test_learnt_variances_predict_numbers():
    la, X = plain_regression()
    la.amortize([X])
    f_mu, f_var = la(X, pred_type="amortized")
    prediction = la.predict(X, pred_type="amortized")
    assert_close(prediction.mean, f_mu)
    variance = variances_of(f_var)
    std = variance.sqrt()
    assert_close(prediction.epistemic_std, std)


def test_rewards_have_no_noise():
    model = lora_model("bert", n_labels=1)
    la = fitted(
        batches=preferences(),
        model=model,
        likelihood="reward_modeling",
    )
    batch = first_batch()
    prediction = la.predict(batch)
    f_mu, f_var = la(batch)
    assert_close(prediction.mean, f_mu)
    variance = variances_of(f_var)
    std = variance.sqrt()
    assert_close(prediction.epistemic_std, std)
    total_std = prediction.total_std
    assert torch.equal(total_std, prediction.epistemic_std)


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
    # So unlike that a mean of the deviations is not one of the variances.
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
    found = mixed.together
    assert_close(found.mean, f_mu)
    assert_close(found.epistemic_std, variance.sqrt())
    assert_close(found.total_std, total_variance.sqrt())


@pytest.mark.parametrize("level", LEVELS)
def test_below_a_mixtures_quantile_lies_as_much_of_its_members(mixed, level):
    x = mixed.together.quantile(level)
    of_members = []
    for member in (mixed.first, mixed.second):
        of_member = norm(member.mean, member.total_std)
        below = of_member.cdf(x)
        of_members.append(below)
    found = np.mean(of_members, axis=0)
    np.testing.assert_allclose(found, level, rtol=1e-9)


def test_a_mixtures_density_is_the_mean_of_its_members(mixed):
    labels = mixed.batch["labels"]
    y = labels.double()
    of_first = mixed.first.log_density(y)
    of_second = mixed.second.log_density(y)
    mean = (of_first.exp() + of_second.exp()) / 2
    found = mixed.together.log_density(y)
    assert_close(found, mean.log())


# --- scores of predictions ------------------------------------------------------------


@dataclass(frozen=True)
class Predicted:
    """Predictions of two numbers for three examples, and what came true."""

    prediction: NumberPrediction
    targets: Tensor


def some_numbers(n_members: int) -> Predicted:
    means = normal(n_members, 3, 2, seed=0)
    roots = normal(n_members, 3, 2, 2, seed=1)
    covariances = roots @ roots.mT
    members = list(zip(means, covariances, strict=True))
    noises = [0.3] * n_members
    drawn = normal(3, 2, seed=2)
    return Predicted(
        prediction=NumberPrediction.of(members, noises),
        targets=2 * drawn,
    )


def ranked_probability_score(
    means: Tensor,
    stds: Tensor,
    target: float,
) -> float:
    """Integrate a mixture's squared distance from the target's step."""
    members = norm(means.numpy(), stds.numpy())

    def squared(x: float) -> float:
        below = members.cdf(x).mean()
        step = x >= target
        return (below - step) ** 2

    # In two parts, as the integrand jumps at the target; beyond 40 nothing is left.
    below, _ = quad(squared, -40, target)
    above, _ = quad(squared, target, 40)
    return below + above


@pytest.mark.parametrize("n_members", [1, 3])
def test_the_ranked_probability_score_is_its_integral(n_members):
    numbers = some_numbers(n_members)
    prediction = numbers.prediction
    scores = prediction.crps(numbers.targets)
    for row, column in np.ndindex(3, 2):
        expected = ranked_probability_score(
            prediction.means[row, :, column],
            prediction.stds[row, :, column],
            numbers.targets[row, column].item(),
        )
        found = scores[row, column].item()
        assert found == pytest.approx(expected, rel=1e-6)


def test_a_sure_prediction_has_its_absolute_error():
    f_mu = torch.zeros(1, 1).double()
    f_var = torch.zeros(1, 1, 1).double()
    # Almost none: a noise of 0 would leave no density.
    noise = 1e-9
    prediction = NumberPrediction.of([(f_mu, f_var)], [noise])
    target = f_mu + 3
    found = prediction.crps(target)
    assert found.item() == pytest.approx(3, rel=1e-7)


OUTSIDE = [-0.1, 0.0, 1.0]


@pytest.mark.parametrize("level", OUTSIDE)
def test_levels_outside_of_0_and_1_are_refused(level):
    prediction = some_numbers(1).prediction
    message = "level must be between 0 and 1"
    with pytest.raises(ValueError, match=message):
        prediction.quantile(level)


@pytest.mark.parametrize("coverage", OUTSIDE)
def test_coverages_outside_of_0_and_1_are_refused(coverage):
    prediction = some_numbers(1).prediction
    message = "coverage must be between 0 and 1"
    with pytest.raises(ValueError, match=message):
        prediction.interval(coverage)
