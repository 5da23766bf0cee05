"""The noise of a regression, chosen together with the prior by validation data."""

import math

import pytest
import torch

from laplace_lora_ext import GridSearch
from laplace_lora_ext.tuning.noise import n_determined, unit_of_priors
from tests.support.posteriors import GRID, STRUCTURES, generator, plain_regression


def validation(la, X, n_outputs, scale=1.0):
    """Make targets with noise of a known size around the model."""
    f = la.predictive_moments(X).f_mu
    noise = torch.randn(len(X), n_outputs, generator=generator(3)).double()
    return [(X[:5], (f + scale * noise)[:5]), (X[5:], (f + scale * noise)[5:])]


def loss_of(la, batches):
    """Average the negative log-density of the targets."""
    total = 0.0
    for X, y in batches:
        f_mu, f_var = la(X)
        noise = la.sigma_noise**2 * torch.eye(f_mu.shape[1]).double()
        density = torch.distributions.MultivariateNormal(f_mu, f_var + noise)
        total -= density.log_prob(y).sum().item()
    return total / sum(len(y) for _, y in batches)


@pytest.mark.parametrize("n_outputs", [1, 2])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_prior_and_noise_are_the_best_of_both(structure, n_outputs):
    la, X = plain_regression(n_outputs, structure)
    batches = validation(la, X, n_outputs, 0.3)
    history = GridSearch(val_loader=batches, **GRID)(la)
    assert len(history.objective) == 8
    for point in range(7):
        la.prior_precision = history.prior_precision[point]
        losses = []
        for factor in (0.99, 1.0, 1.01):
            la.sigma_noise = factor * history.sigma_noise[point].item()
            # The prior is relative to the noise.
            la.prior_precision = history.prior_precision[point] / factor**2
            losses.append(loss_of(la, batches))
        assert losses[1] == pytest.approx(history.objective[point].item(), rel=1e-5)
        assert losses[1] < min(losses[0], losses[2])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_targets_of_any_scale_have_their_noise(structure, scale):
    la, X = plain_regression(1, structure)
    GridSearch(val_loader=validation(la, X, 1, scale))(la)
    _, f_var = la(X)
    total = (f_var[:, 0, 0] + la.sigma_noise**2).sqrt()
    assert 0.5 < (total.mean() / scale).item() < 1.6


@pytest.mark.parametrize("structure", STRUCTURES)
def test_parameters_that_data_determine_are_counted_by_eigenvalues(structure):
    la, _ = plain_regression(2, structure)
    la.prior_precision = 0.3
    P = la.posterior_precision
    matrix = P.to_matrix() if hasattr(P, "to_matrix") else P.diag() if P.ndim == 1 else P
    eigenvalues = torch.linalg.eigvalsh(matrix)
    expected = (1 - 0.3 / eigenvalues).sum().item()
    assert n_determined(la) == pytest.approx(expected, rel=1e-6)
    assert la.sigma_noise.item() == 0.5
    trace = ((eigenvalues - 0.3) * 0.25).sum().item()  # of the curvature at a noise of 1
    assert unit_of_priors(la) == pytest.approx(trace / (12 * 2), rel=1e-6)
    assert la.prior_precision.item() == pytest.approx(0.3)


def test_targets_without_any_error_are_refused():
    la, X = plain_regression(1)
    exact = [(X, la.predictive_moments(X).f_mu.float().double())]
    with pytest.raises(ValueError, match=r"without any error.*optimize_scale=False"):
        GridSearch(val_loader=la.predictive_statistics(exact, dtype=torch.float32))(la)
    assert la.sigma_noise.item() == 0.5


def test_the_noise_alone_is_the_last_point():
    la, X = plain_regression(1)
    batches = validation(la, X, 1)
    history = GridSearch(val_loader=batches, **GRID)(la)
    residuals = torch.cat([y - la.predictive_moments(x).f_mu for x, y in batches])
    variance = residuals.square().mean().item()
    expected = (math.log(2 * math.pi * variance) + 1) / 2
    assert history.objective[-1].item() == pytest.approx(expected, rel=1e-5)
