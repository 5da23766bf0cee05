"""Predictions of numbers, against independent integrals."""

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm
from torch.testing import assert_close

from laplace_lora_ext import NumberPrediction
from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import STRUCTURES, fitted, generator, plain_regression
from tests.test_mixture import preferences, two

LEVELS = [0.01, 0.3, 0.5, 0.95]
NOISE_VARIANCE = 0.5**2  # what `plain_regression` is fitted with


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_posterior_predicts_normal_targets(structure):
    la, X = plain_regression(2, structure)
    mean, covariance = la(X)
    prediction = la.predict([X[:5], X[5:]])
    assert isinstance(prediction, NumberPrediction)
    variance = covariance.diagonal(dim1=1, dim2=2)
    assert_close(prediction.mean, mean)
    assert_close(prediction.epistemic_std, variance.sqrt())
    total_std = (variance + NOISE_VARIANCE).sqrt()
    assert_close(prediction.total_std, total_std)
    for level in LEVELS:
        z = norm.ppf(level)
        assert_close(prediction.quantile(level), mean + z * total_std)
    low, high = prediction.interval(0.8)
    assert_close(low, prediction.quantile(0.1))
    assert_close(high, prediction.quantile(0.9))


def test_what_may_be_predicted_at_once():
    la, X = plain_regression()
    of_batch = la.predict(X)
    of_moments = la.predict(la.predictive_moments(X))
    of_rows = la.predict(list(X), collate_fn=torch.stack, batch_size=5)
    for found in (of_moments, of_rows):
        for part, expected in zip(found, of_batch, strict=True):
            assert_close(part, expected)


def test_learnt_variances_predict_numbers():
    la, X = plain_regression()
    la.amortize([X])
    f_mu, f_var = la(X, pred_type="amortized")
    prediction = la.predict(X, pred_type="amortized")
    assert_close(prediction.mean, f_mu)
    variance = f_var.diagonal(dim1=1, dim2=2)
    assert_close(prediction.epistemic_std, variance.sqrt())


def test_rewards_have_no_noise():
    la = fitted(
        batches=preferences(),
        model=lora_model("bert", n_labels=1),
        likelihood="reward_modeling",
    )
    batch = ragged_batches()[0]
    prediction = la.predict(batch)
    mean, covariance = la(batch)
    assert_close(prediction.mean, mean)
    assert_close(prediction.total_std, covariance[:, 0].sqrt())
    assert torch.equal(prediction.total_std, prediction.epistemic_std)


def test_a_mixture_predicts_the_mean_of_its_members_distributions():
    both = two("numbers")
    (batch,) = both.batches
    both.first.sigma_noise = 0.2
    both.second.sigma_noise = 0.6
    mixture = both.mixture()
    prediction = mixture.predict(batch)

    mean, covariance = mixture(batch)
    variance = covariance.diagonal(dim1=1, dim2=2)
    noise_variance = (0.2**2 + 0.6**2) / 2
    assert_close(prediction.mean, mean)
    assert_close(prediction.epistemic_std, variance.sqrt())
    assert_close(prediction.total_std, (variance + noise_variance).sqrt())

    first = both.first.predict(batch)
    second = both.second.predict(batch)
    for level in LEVELS:
        x = prediction.quantile(level)
        below_of_first = norm.cdf(x, first.mean, first.total_std)
        below_of_second = norm.cdf(x, second.mean, second.total_std)
        below = (below_of_first + below_of_second) / 2
        np.testing.assert_allclose(below, level, rtol=1e-9)
    y = batch["labels"].double()
    density = (first.log_density(y).exp() + second.log_density(y).exp()) / 2
    assert_close(prediction.log_density(y), density.log())


def some_numbers(n_members: int) -> tuple[NumberPrediction, torch.Tensor]:
    """Make predictions of two numbers for three examples, and targets."""
    means = torch.randn(n_members, 3, 2, generator=generator()).double()
    roots = torch.randn(n_members, 3, 2, 2, generator=generator(1)).double()
    members = list(zip(means, roots @ roots.mT, strict=True))
    prediction = NumberPrediction.of(members, [0.3] * n_members)
    targets = 2 * torch.randn(3, 2, generator=generator(2)).double()
    return prediction, targets


def ranked_probability_score(
    means: np.ndarray,
    stds: np.ndarray,
    target: float,
) -> float:
    """Integrate a mixture's squared distance from the target's step."""

    def squared(x: float) -> float:
        return (norm.cdf(x, means, stds).mean() - (x >= target)) ** 2

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
    prediction = NumberPrediction.of([(f_mu, f_var)], [1e-9])
    assert_close(prediction.crps(f_mu + 3), f_mu + 3)


@pytest.mark.parametrize("level", [-0.1, 0.0, 1.0])
def test_levels_outside_of_0_and_1_are_refused(level):
    prediction, _ = some_numbers(1)
    with pytest.raises(ValueError, match="level must be between 0 and 1"):
        prediction.quantile(level)
    with pytest.raises(ValueError, match="coverage must be between 0 and 1"):
        prediction.interval(level)
