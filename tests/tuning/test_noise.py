"""The noise of a regression, chosen together with the prior."""

import math
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from laplace_lora_ext import Agreement, GridSearch, LaplaceMixture, ValGD
from laplace_lora_ext.tuning.agreement import n_determined
from laplace_lora_ext.tuning.method import unit_of_priors
from tests.support.posteriors import (
    GRID,
    STRUCTURES,
    generator,
    normal,
    plain_regression,
)

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
        # The targets have the first member's noise.
        loss = loss_of(mixture, batches, SIGMA_NOISE)
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


# --- what data determine --------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_what_data_determine_and_a_priors_unit_are_told_by_eigenvalues(structure):
    la, _ = plain_regression(2, structure)
    la.temperature = 0.5
    # Another than 1, which divides nothing.
    la.prior_precision = 0.3
    of_precision = eigenvalues_of_precision(la)
    determined = (1 - 0.3 / of_precision).sum().item()
    assert n_determined(la) == pytest.approx(determined, rel=1e-6)
    # The unit is of the curvature at a noise of 1, divided by the temperature.
    trace = SIGMA_NOISE**2 * (of_precision - 0.3).sum().item()
    assert unit_of_priors(la) == pytest.approx(trace / (2 * N_EXAMPLES), rel=1e-6)
    # Both are left as they were, without a graph.
    assert not la.sigma_noise.requires_grad
    assert la.sigma_noise.item() == SIGMA_NOISE


# --- by the gradient of validation data -----------------------------------------------


@pytest.mark.parametrize(("scale", "n_outputs"), [(1e-3, 1), (1e3, 2)])
def test_a_descent_ends_at_the_best_prior_and_noise(scale, n_outputs):
    la, _ = plain_regression(n_outputs)
    # What the model predicts here is off by a draw of a posterior, beside the noise:
    # without that, no prior would be too narrow.
    la.sigma_noise = scale
    la.prior_precision = 5 / scale**2
    X = normal(60, 5, seed=7)
    noise = scale * normal(60, n_outputs, seed=8)
    batches = [(X, la.function(seed=0)(X).detach() + noise)]
    statistics = la.predictive_statistics(batches, dtype=torch.float64)
    la.sigma_noise = 1.0
    # By all examples at each step: an objective is the loss of all.
    history = ValGD(
        val_loader=statistics, batch_size=60, n_steps=500, generator=generator()
    )(la)
    chosen = la.prior_precision.clone(), la.sigma_noise.item()
    # Otherwise there would be no descent.
    assert history.choice > 0
    for trial in (history.trials[0], history.trials[10], history.chosen):
        loss = loss_at(la, batches, trial.prior_precision, trial.sigma_noise)
        assert loss == pytest.approx(trial.objective, rel=1e-6)

    prior_precision, sigma_noise = chosen
    for factor in (0.9, 1.1):
        of_another_noise = loss_at(la, batches, prior_precision, factor * sigma_noise)
        of_another_prior = loss_at(la, batches, factor * prior_precision, sigma_noise)
        assert min(of_another_noise, of_another_prior) > history.loss
    # Three standard errors, which are 1 / sqrt(120), of the noise of sixty draws.
    assert sigma_noise == pytest.approx(scale, rel=0.3)


# --- by agreement ---------------------------------------------------------------------

N_SAMPLES = 5_000
"""Draws of an agreement: enough to compare its change with the exact one to 3%."""


def mean_distance(la: Any, X: Tensor, n_samples: int = 20_000) -> float:
    """Average draws' total variation distance from the model."""
    torch.manual_seed(1)
    _, f_var = la(X)
    zeros = torch.zeros(f_var.shape[-1]).double()
    deviations = MultivariateNormal(zeros, f_var).sample((n_samples,))
    # Two normals with one noise differ along the line between their means alone.
    halves = deviations.norm(dim=-1) / (2 * la.sigma_noise)
    return (2 * Normal(0, 1).cdf(halves) - 1).mean().item()


def noise_of_residuals(la: Any, X: Tensor, determined: Tensor) -> float:
    """Estimate the noise of the data that `plain_regression` is fitted to.

    Parameters that the data determine take as many degrees of freedom.
    """
    f_mu, _ = la.predictive_moments(X)
    residuals = normal(*f_mu.shape, seed=1) - f_mu
    variance = residuals.square().sum() / (residuals.numel() - determined)
    return variance.sqrt().item()


@pytest.mark.parametrize(
    ("structure", "n_outputs", "max_change"),
    [("lowrank_kron", 1, 0.05), ("lowrank_kron", 2, 0.1), ("kron", 2, 0.05)],
)
def test_an_agreement_allows_a_change_and_takes_the_noise_of_residuals(
    structure, n_outputs, max_change
):
    la, X = plain_regression(n_outputs, structure)
    history = Agreement(
        train_loader=[X],
        max_change=max_change,
        n_samples=N_SAMPLES,
        generator=generator(),
    )(la)
    assert mean_distance(la, X) == pytest.approx(max_change, rel=0.03)
    assert history.chosen.objective == pytest.approx(max_change, rel=0.03)
    determined = (1 - la.prior_precision / eigenvalues_of_precision(la)).sum()
    expected = noise_of_residuals(la, X, determined)
    assert la.sigma_noise.item() == pytest.approx(expected, rel=1e-5)
    assert history.chosen.sigma_noise == pytest.approx(expected, rel=1e-5)


def test_of_one_number_the_distance_has_a_closed_form():
    la, X = plain_regression(1)
    Agreement(train_loader=[X], n_samples=N_SAMPLES)(la)
    s = la(X)[1].flatten().sqrt() / la.sigma_noise
    # The mean of 2 Φ(|z| s / 2) - 1 over standard normal z.
    found = (2 / math.pi * torch.atan(s / 2)).mean().item()
    # The change that is allowed unless told otherwise.
    assert found == pytest.approx(0.1, rel=0.03)


def test_exact_curvature_determines_as_many_parameters_as_the_predictions_show():
    """In the linear-Gaussian model, `Σ e / (e + λ)` is the trace of the hat matrix."""
    la, X = plain_regression(2, "full")
    Agreement(train_loader=[X])(la)
    variances = la(X)[1].diagonal(dim1=1, dim2=2)
    expected = noise_of_residuals(la, X, variances.sum() / la.sigma_noise**2)
    assert la.sigma_noise.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("unit", "sigma_noise"), [(1e-6, 1e3), (1e6, 0.5)])
def test_agreement_prefers_no_unit(unit, sigma_noise):
    in_one, X = plain_regression(1)
    agreement = Agreement(train_loader=[X])
    agreement(in_one)

    la, _ = plain_regression(1)
    head = la.model.model.second
    # What its predictions are proportional to.
    for weight in (head.weight, head.bias, head.lora_B["default"].weight):
        weight.data.mul_(unit)
    la.sigma_noise = sigma_noise
    la.fit([(X, unit * normal(N_EXAMPLES, 1, seed=1))])
    agreement(la)
    noise = la.sigma_noise.item() / in_one.sigma_noise.item()
    assert noise == pytest.approx(unit, rel=0.01)
    deviations = la.predict(X).epistemic_std / in_one.predict(X).epistemic_std
    # The prior was chosen by no more than a hundred draws of the posterior.
    assert deviations.mean().item() == pytest.approx(unit, rel=0.1)


def test_residuals_that_tell_no_noise_are_refused():
    la, X = plain_regression(1)
    la.fit([(X, la.predictive_moments(X).f_mu)])
    with pytest.raises(ValueError, match=r"error of 0,.*second_training"):
        Agreement(train_loader=[X])(la)
    assert la.sigma_noise.item() == SIGMA_NOISE
    la, X = plain_regression(2)
    # So much change asks for so broad a prior.
    with pytest.raises(ValueError, match=r"have 24 targets, .*second_training"):
        Agreement(train_loader=[X], max_change=0.6)(la)
