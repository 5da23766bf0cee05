"""The noise of a regression, chosen together with the prior."""

import math

import pytest
import torch

from laplace_lora_ext import Agreement, GridSearch, ValGD
from laplace_lora_ext.tuning.noise import n_determined, unit_of_priors
from tests.support.posteriors import GRID, STRUCTURES, generator, plain_regression


def validation(la, X, n_outputs, scale=1.0):
    """Make targets with noise of a known size around the model."""
    f = la.predictive_moments(X).f_mu
    noise = torch.randn(len(X), n_outputs, generator=generator(3)).double()
    y = f + scale * noise
    return [(X[:5], y[:5]), (X[5:], y[5:])]


def eigenvalues_of_precision(la) -> torch.Tensor:
    """Compute all eigenvalues of the posterior precision, whatever its structure."""
    P = la.posterior_precision
    if hasattr(P, "to_matrix"):
        return torch.linalg.eigvalsh(P.to_matrix())
    if P.ndim == 1:
        return torch.linalg.eigvalsh(P.diag())
    return torch.linalg.eigvalsh(P)


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
        below, chosen, above = losses
        objective = history.objective[point].item()
        assert chosen == pytest.approx(objective, rel=1e-5)
        assert chosen < min(below, above)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_targets_of_any_scale_have_their_noise(structure, scale):
    la, X = plain_regression(1, structure)
    GridSearch(val_loader=validation(la, X, 1, scale))(la)
    _, f_var = la(X)
    total_std = (f_var[:, 0, 0] + la.sigma_noise**2).sqrt()
    # Chance moves the standard deviation of twelve draws by 1 / sqrt(24), or 20%.
    assert 0.5 < (total_std.mean() / scale).item() < 1.6


@pytest.mark.parametrize("structure", STRUCTURES)
def test_parameters_that_data_determine_are_counted_by_eigenvalues(structure):
    la, _ = plain_regression(2, structure)
    la.prior_precision = 0.3
    eigenvalues = eigenvalues_of_precision(la)
    expected = (1 - 0.3 / eigenvalues).sum().item()
    assert n_determined(la) == pytest.approx(expected, rel=1e-6)
    assert la.sigma_noise.item() == 0.5
    # Of the curvature at a noise of 1.
    trace = ((eigenvalues - 0.3) * 0.25).sum().item()
    n_targets = 12 * 2  # examples and outputs of `plain_regression`
    assert unit_of_priors(la) == pytest.approx(trace / n_targets, rel=1e-6)
    assert la.prior_precision.item() == pytest.approx(0.3)


# --- by the gradient of validation data -----------------------------------------------


@pytest.mark.parametrize("n_outputs", [1, 2])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_descent_ends_where_neither_prior_nor_noise_could_be_better(n_outputs, scale):
    la, _ = plain_regression(n_outputs)
    # What the model predicts here is off by a draw of a posterior, beside the noise.
    la.sigma_noise = scale
    la.prior_precision = 5 / scale**2
    X = torch.randn(60, 5, generator=generator(7)).double()
    noise = scale * torch.randn(60, n_outputs, generator=generator(8)).double()
    batches = [(X, la.function(0)(X).detach() + noise)]
    statistics = la.predictive_statistics(batches, dtype=torch.float64)
    la.sigma_noise = 1.0
    method = ValGD(
        val_loader=statistics,
        batch_size=60,
        n_steps=500,
        generator=generator(),
    )
    history = method(la)
    lowest = history.objective.min().item()
    assert lowest < history.objective[0].item()
    for step in (0, 10, history.objective.argmin()):
        la.sigma_noise = history.sigma_noise[step].item()
        la.prior_precision = history.prior_precision[step]
        objective = history.objective[step].item()
        assert loss_of(la, batches) == pytest.approx(objective, rel=1e-6)
    best = la.hyperparameters
    for factor in (0.9, 1.1):
        la.hyperparameters = best
        la.sigma_noise = factor * la.sigma_noise
        assert loss_of(la, batches) > lowest
        la.hyperparameters = best
        la.prior_precision = factor * la.prior_precision
        assert loss_of(la, batches) > lowest
    # Three standard errors, which are 1 / sqrt(120), of the noise of sixty draws.
    assert best.sigma_noise.item() == pytest.approx(scale, rel=0.3)


# --- by agreement ---------------------------------------------------------------------


def mean_distance(la, X, n_samples: int = 20_000) -> float:
    """Average draws' total variation distance from the model."""
    torch.manual_seed(1)
    _, f_var = la(X)
    zeros = torch.zeros(f_var.shape[-1]).double()
    drawn = torch.distributions.MultivariateNormal(zeros, f_var)
    apart = drawn.sample((n_samples,)).norm(dim=-1) / la.sigma_noise
    # Of two normals with one noise, by the distance of their means.
    standard = torch.distributions.Normal(0, 1)
    return (2 * standard.cdf(apart / 2) - 1).mean().item()


def residuals_of(la, X, n_outputs: int):
    """Compute the residuals of the data that `plain_regression` is fitted to."""
    y = torch.randn(12, n_outputs, generator=generator(1)).double()
    return la.predictive_moments(X).f_mu - y


@pytest.mark.parametrize("n_outputs", [1, 2])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("max_change", [0.05, 0.1])
def test_draws_of_numbers_change_by_as_much_as_is_allowed(
    structure, n_outputs, max_change
):
    la, X = plain_regression(n_outputs, structure)
    method = Agreement(
        train_loader=[X],
        max_change=max_change,
        n_samples=5_000,
        generator=generator(),
    )
    history = method(la)
    assert mean_distance(la, X) == pytest.approx(max_change, rel=0.03)
    assert history.objective[-1].item() == pytest.approx(max_change, rel=0.03)
    assert history.sigma_noise[-1] == pytest.approx(la.sigma_noise.item())
    # The parameters that the data determine, by all eigenvalues.
    determined = (1 - la.prior_precision / eigenvalues_of_precision(la)).sum()
    squares = residuals_of(la, X, n_outputs).square().sum()
    expected = (squares / (12 * n_outputs - determined)).sqrt()
    assert la.sigma_noise.item() == pytest.approx(expected.item(), rel=1e-5)


def test_of_one_number_the_distance_has_a_closed_form():
    la, X = plain_regression(1)
    Agreement(train_loader=[X], n_samples=5_000)(la)
    _, f_var = la(X)
    relative = f_var[:, 0, 0] / la.sigma_noise**2
    distances = 2 / math.pi * (relative.sqrt() / 2).atan()
    assert distances.mean().item() == pytest.approx(0.1, rel=0.03)


def test_exact_curvature_determines_as_many_parameters_as_the_predictions_show():
    """In the linear-Gaussian model, `Σ e / (e + λ)` is the trace of the hat matrix."""
    la, X = plain_regression(2, "full")
    Agreement(train_loader=[X])(la)
    _, f_var = la(X)
    trace = f_var.diagonal(dim1=1, dim2=2).sum() / la.sigma_noise**2
    squares = residuals_of(la, X, 2).square().sum()
    expected = (squares / (24 - trace)).sqrt()
    assert la.sigma_noise.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("sigma_noise", [1e-3, 0.5, 1e3])
@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_agreement_prefers_no_unit(unit, sigma_noise):
    expected, X = plain_regression(1)
    Agreement(train_loader=[X])(expected)
    la, _ = plain_regression(1)
    head = la.model.model.second
    for weight in (head.weight, head.bias, head.lora_B["default"].weight):
        weight.data.mul_(unit)
    la.sigma_noise = sigma_noise
    y = unit * torch.randn(12, 1, generator=generator(1)).double()
    la.fit([(X, y)])
    Agreement(train_loader=[X])(la)
    sigma_noise_in_unit = unit * expected.sigma_noise.item()
    assert la.sigma_noise.item() == pytest.approx(sigma_noise_in_unit, rel=0.01)
    std_in_unit = unit * expected.predict(X).epistemic_std
    ratio = la.predict(X).epistemic_std / std_in_unit
    assert ratio.mean().item() == pytest.approx(1, rel=0.1)


def test_residuals_that_tell_of_no_noise_are_refused():
    la, X = plain_regression(1)
    exact = la.predictive_moments(X).f_mu
    la.fit([(X, exact)])
    with pytest.raises(ValueError, match=r"without any error.*second_training"):
        Agreement(train_loader=[X])(la)
    assert la.sigma_noise.item() == 0.5
    la, X = plain_regression(2)
    message = r"have 24 targets, which leaves none.*second_training"
    with pytest.raises(ValueError, match=message):
        Agreement(train_loader=[X], max_change=0.6)(la)


# --- refused --------------------------------------------------------------------------


def test_targets_without_any_error_are_refused():
    la, X = plain_regression(1)
    # Rounded as the statistics round the means: every residual is exactly 0.
    y = la.predictive_moments(X).f_mu.float().double()
    statistics = la.predictive_statistics([(X, y)], dtype=torch.float32)
    with pytest.raises(ValueError, match=r"without any error.*optimize_scale=False"):
        GridSearch(val_loader=statistics)(la)
    assert la.sigma_noise.item() == 0.5


def test_the_noise_alone_is_the_last_point():
    la, X = plain_regression(1)
    batches = validation(la, X, 1)
    history = GridSearch(val_loader=batches, **GRID)(la)
    residuals = [y - la.predictive_moments(x).f_mu for x, y in batches]
    variance = torch.cat(residuals).square().mean().item()
    expected = (math.log(2 * math.pi * variance) + 1) / 2
    assert history.objective[-1].item() == pytest.approx(expected, rel=1e-5)
