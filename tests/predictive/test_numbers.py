"""Predictions of numbers, against independent integrals."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext import NumberPrediction
from tests.support.models import first_batch, lora_model
from tests.support.posteriors import fitted, normal, plain_regression
from tests.support.tasks import preferences, two

# The tails, the middle, and one between.
LEVELS = [0.01, 0.3, 0.5, 0.95]
# What `plain_regression` is fitted with.
NOISE_VARIANCE = 0.5**2


def variances_of(f_var: Tensor) -> Tensor:
    """Take variances `(N, outputs)` out of covariances."""
    return f_var.diagonal(dim1=1, dim2=2)


# --- a posterior's --------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag"])
def test_a_posterior_predicts_normal_targets(structure):
    la, X = plain_regression(2, structure)
    f_mu, f_var = la(X)
    prediction = la.predict(X)
    assert isinstance(prediction, NumberPrediction)
    variance = variances_of(f_var)
    assert_close(prediction.mean, f_mu)
    assert_close(prediction.epistemic_std, variance.sqrt())
    assert_close(prediction.total_std, (variance + NOISE_VARIANCE).sqrt())
    for level in LEVELS:
        expected = prediction.mean + norm.ppf(level) * prediction.total_std
        assert_close(prediction.quantile(level), expected)
    # As much lies below an interval as above.
    ends = prediction.quantile(0.1), prediction.quantile(0.9)
    assert_close(prediction.interval(0.8), ends)


def test_batches_moments_and_rows_are_predicted_alike():
    la, X = plain_regression()
    expected = tuple(la.predict(X))
    moments = la.predictive_moments(X)
    for data in ([X[:5], X[5:]], moments):
        assert_close(tuple(la.predict(data)), expected)
    # As a data set gives them, one by one.
    by_rows = la.predict(list(X), collate_fn=torch.stack, batch_size=5)
    assert_close(tuple(by_rows), expected)


def test_learnt_variances_predict_numbers():
    la, X = plain_regression()
    la.amortize([X])
    f_mu, f_var = la(X, pred_type="amortized")
    prediction = la.predict(X, pred_type="amortized")
    assert_close(prediction.mean, f_mu)
    assert_close(prediction.epistemic_std, variances_of(f_var).sqrt())


def test_rewards_have_no_noise():
    model = lora_model("bert", n_labels=1)
    la = fitted(batches=preferences(), model=model, likelihood="reward_modeling")
    batch = first_batch()
    prediction = la.predict(batch)
    f_mu, f_var = la(batch)
    assert_close(prediction.mean, f_mu)
    assert_close(prediction.epistemic_std, variances_of(f_var).sqrt())
    assert torch.equal(prediction.total_std, prediction.epistemic_std)


# --- a mixture's ----------------------------------------------------------------------


def test_a_mixture_predicts_the_mean_of_its_members_distributions():
    # So unlike that a mean of the deviations is not one of the variances.
    both = two("numbers")
    both.first.sigma_noise = 0.2
    both.second.sigma_noise = 0.6
    (batch,) = both.batches
    mixture = both.mixture()
    f_mu, f_var = mixture(batch)
    together = mixture.predict(batch)
    variance = variances_of(f_var)
    total_variance = variance + (0.2**2 + 0.6**2) / 2
    assert_close(together.mean, f_mu)
    assert_close(together.epistemic_std, variance.sqrt())
    assert_close(together.total_std, total_variance.sqrt())

    members = [member.predict(batch) for member in both.members]
    # The law of total variance.
    squares = [each.epistemic_std**2 + (each.mean - f_mu) ** 2 for each in members]
    assert_close(variance, sum(squares) / 2)
    for level in LEVELS:
        x = together.quantile(level)
        below = [norm(each.mean, each.total_std).cdf(x) for each in members]
        np.testing.assert_allclose(np.mean(below, axis=0), level, rtol=1e-9)
    y = batch["labels"].double()
    densities = torch.stack([each.log_density(y).exp() for each in members])
    assert_close(together.log_density(y), densities.mean(0).log())


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
    return Predicted(prediction=NumberPrediction.of(members, noises), targets=2 * drawn)


def ranked_probability_score(means: Tensor, stds: Tensor, target: float) -> float:
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


@pytest.mark.parametrize("outside", [-0.1, 0.0, 1.0])
def test_levels_and_coverages_outside_of_0_and_1_are_refused(outside):
    prediction = some_numbers(1).prediction
    with pytest.raises(ValueError, match="level must be between"):
        prediction.quantile(outside)
    with pytest.raises(ValueError, match="coverage must be between"):
        prediction.interval(outside)
