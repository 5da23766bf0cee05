"""The noise of a regression, chosen together with the prior."""

import math
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from laplace_lora_ext import Agreement, GridSearch, LaplaceMixture, ValGD
from laplace_lora_ext.tuning.method import unit_of_priors
from tests.support.posteriors import GRID, STRUCTURES, normal, plain_regression

# Of `plain_regression`, which is fitted with this noise.
N_EXAMPLES = 12
SIGMA_NOISE = 0.5

Batch = tuple[Tensor, Tensor]


def validation(la: Any, X: Tensor, scale: float = 1.0) -> list[Batch]:
    """Make targets with noise of a known size around the model."""
    f_mu, _ = la.predictive_moments(X)
    y = f_mu + scale * normal(*f_mu.shape, seed=3)
    # Of unlike sizes, so that a mean of batches is not that of their examples.
    return [(X[:5], y[:5]), (X[5:], y[5:])]


def eigenvalues_of_precision(la: Any) -> Tensor:
    """Compute all eigenvalues of the posterior precision, whatever its structure."""
    P = la.posterior_precision
    if hasattr(P, "to_matrix"):
        P = P.to_matrix()
    elif P.ndim == 1:
        P = P.diag()
    return torch.linalg.eigvalsh(P)


def loss_of(la: Any, batches: list[Batch], sigma_noise: Any) -> float:
    """Average the negative log-density of the targets."""
    losses = []
    for X, y in batches:
        f_mu, f_var = la(X)
        noise = sigma_noise**2 * torch.eye(y.shape[1]).double()
        losses.append(-MultivariateNormal(f_mu, f_var + noise).log_prob(y))
    return torch.cat(losses).mean().item()


def loss_at(
    la: Any, batches: list[Batch], prior_precision: Tensor, sigma_noise: float
) -> float:
    """Average the negative log-density at a prior and a noise."""
    la.sigma_noise = sigma_noise
    la.prior_precision = prior_precision
    return loss_of(la, batches, sigma_noise)


# --- by a grid ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structure", "n_outputs"), [("lowrank_kron", 1), ("lowrank_kron", 2), ("full", 2)]
)
def test_each_prior_has_the_noise_that_is_best_for_it(structure, n_outputs):
    la, X = plain_regression(n_outputs, structure)
    batches = validation(la, X, scale=0.3)
    history = GridSearch(val_loader=batches, **GRID)(la)
    # The last point is the noise alone.
    *trials, last = history.trials
    assert len(trials) == GRID["grid_size"]
    for trial in trials:

        def loss_times(factor: float, trial: Any = trial) -> float:
            # The search's priors are relative to the noise, which moves alone here.
            prior_precision = trial.prior_precision / factor**2
            return loss_at(la, batches, prior_precision, factor * trial.sigma_noise)

        loss = loss_times(1.0)
        assert loss == pytest.approx(trial.objective, rel=1e-5)
        assert loss < loss_times(0.99)
        assert loss < loss_times(1.01)

    y = torch.cat([y for _, y in batches])
    residuals = y - la.predictive_moments(X).f_mu
    variance = residuals.square().mean().item()
    # The mean negative log-density of normals at the variance of their own residuals.
    expected = n_outputs * (math.log(2 * math.pi * variance) + 1) / 2
    assert last.objective == pytest.approx(expected, rel=1e-5)


def test_a_mixture_keeps_the_noise_of_its_members():
    la, X = plain_regression()
    other = copy(la)
    other.sigma_noise = 0.7
    batches = validation(la, X, scale=0.3)
    mixture = LaplaceMixture([la, other])
    history = GridSearch(val_loader=batches, **GRID)(mixture)
    noises = [member.sigma_noise.item() for member in mixture.members]
    assert noises == pytest.approx([SIGMA_NOISE, 0.7])
    assert history.sigma_noise is None
    assert len(history.trials) == GRID["grid_size"]
    for trial in history.trials:
        mixture.prior_precision = trial.prior_precision
        # By the law of total variance, as the mixture predicts.
        loss = loss_of(mixture, batches, math.sqrt((SIGMA_NOISE**2 + 0.7**2) / 2))
        assert loss == pytest.approx(trial.objective, rel=1e-5)


@pytest.mark.parametrize(
    ("structure", "scale"), [("lowrank_kron", 1e-3), ("diag", 1e3)]
)
def test_targets_of_any_scale_have_their_noise(structure, scale):
    la, X = plain_regression(1, structure)
    history = GridSearch(val_loader=validation(la, X, scale))(la)
    variances = la(X)[1].flatten() + la.sigma_noise**2
    # Chance moves the standard deviation of twelve draws by 1 / sqrt(24), or 20%.
    assert 0.5 < variances.sqrt().mean().item() / scale < 1.6
    # The noise alone leaves no variance, whatever the unit.
    for point, has_variance in ((-2, True), (-1, False)):
        la.hyperparameters = replace(history, choice=point).chosen
        assert ("without variance" not in repr(la)) == has_variance


def test_targets_without_any_error_are_refused():
    la, X = plain_regression(1)
    f_mu, _ = la.predictive_moments(X)
    # Rounded as the statistics round the means: every residual is exactly 0.
    statistics = la.predictive_statistics([(X, f_mu.float().double())])
    with pytest.raises(ValueError, match=r"without any error.*optimize_scale=False"):
        GridSearch(val_loader=statistics)(la)
    assert la.sigma_noise.item() == SIGMA_NOISE


# --- the unit of priors ---------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_priors_unit_is_told_by_eigenvalues(structure):
    la, _ = plain_regression(2, structure)
    la.temperature = 0.5
    # Another than 1, which divides nothing.
    la.prior_precision = 0.3
    of_precision = eigenvalues_of_precision(la)
    # The unit is of the curvature at a noise of 1, divided by the temperature.
    trace = SIGMA_NOISE**2 * (of_precision - 0.3).sum().item()
    assert unit_of_priors(la) == pytest.approx(trace / (2 * N_EXAMPLES), rel=1e-6)


@pytest.mark.parametrize("method", [Agreement, ValGD])
def test_methods_of_classes_refuse_numbers(method):
    la, X = plain_regression()
    data = "train_loader" if method is Agreement else "val_loader"
    with pytest.raises(NotImplementedError, match=r"needs classes.*gridsearch"):
        method(**{data: validation(la, X)})(la)
    assert la.sigma_noise.item() == SIGMA_NOISE
