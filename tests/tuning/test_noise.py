"""The noise of a regression, chosen together with the prior."""

import math

import pytest
import torch
from torch.distributions import MultivariateNormal, Normal

from laplace_lora_ext import Agreement, GridSearch, ValGD
from laplace_lora_ext.tuning.noise import n_determined, unit_of_priors
from tests.support.posteriors import GRID, STRUCTURES, generator, plain_regression

# Of `plain_regression`, which is fitted with this noise.
N_EXAMPLES = 12
SIGMA_NOISE = 0.5


def normal_draws(n: int, n_outputs: int, seed: int) -> torch.Tensor:
    """Draw standard normal numbers `(n, n_outputs)` in float64."""
    drawn = torch.randn(n, n_outputs, generator=generator(seed))
    return drawn.double()


def validation(la, X, n_outputs, scale=1.0):
    """Make targets with noise of a known size around the model."""
    f = la.predictive_moments(X).f_mu
    y = f + scale * normal_draws(len(X), n_outputs, seed=3)
    small = (X[:5], y[:5])
    large = (X[5:], y[5:])
    return [small, large]


def eigenvalues_of_precision(la) -> torch.Tensor:
    """Compute all eigenvalues of the posterior precision, whatever its structure."""
    P = la.posterior_precision
    if hasattr(P, "to_matrix"):
        P = P.to_matrix()
    elif P.ndim == 1:
        P = P.diag()
    return torch.linalg.eigvalsh(P)


def loss_of(la, batches) -> float:
    """Average the negative log-density of the targets."""
    losses = []
    for X, y in batches:
        f_mu, f_var = la(X)
        noise = la.sigma_noise**2 * torch.eye(y.shape[1]).double()
        predictive = MultivariateNormal(f_mu, f_var + noise)
        losses.append(-predictive.log_prob(y))
    return torch.cat(losses).mean().item()


@pytest.mark.parametrize("n_outputs", [1, 2])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_prior_and_noise_are_the_best_of_both(structure, n_outputs):
    la, X = plain_regression(n_outputs, structure)
    batches = validation(la, X, n_outputs, scale=0.3)
    search = GridSearch(val_loader=batches, **GRID)
    history = search(la)
    # The last point is the noise alone, which has a test of its own.
    n_priors = GRID["grid_size"]
    assert len(history.objective) == n_priors + 1
    for point in range(n_priors):
        prior = history.prior_precision[point]
        noise = history.sigma_noise[point].item()
        losses = {}
        for factor in (0.99, 1.0, 1.01):
            la.sigma_noise = factor * noise
            # The search's priors are relative to the noise, which moves alone here.
            la.prior_precision = prior / factor**2
            losses[factor] = loss_of(la, batches)
        objective = history.objective[point].item()
        assert losses[1.0] == pytest.approx(objective, rel=1e-5)
        assert losses[1.0] < losses[0.99]
        assert losses[1.0] < losses[1.01]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_targets_of_any_scale_have_their_noise(structure, scale):
    la, X = plain_regression(1, structure)
    batches = validation(la, X, 1, scale)
    search = GridSearch(val_loader=batches)
    search(la)
    _, f_var = la(X)
    variance = f_var.flatten() + la.sigma_noise**2
    ratio = variance.sqrt().mean().item() / scale
    # Chance moves the standard deviation of twelve draws by 1 / sqrt(24), or 20%.
    assert 0.5 < ratio < 1.6


@pytest.mark.parametrize("structure", STRUCTURES)
def test_parameters_that_data_determine_are_counted_by_eigenvalues(structure):
    la, _ = plain_regression(2, structure)
    prior = 0.3
    la.prior_precision = prior
    of_precision = eigenvalues_of_precision(la)
    expected = (1 - prior / of_precision).sum().item()
    assert n_determined(la) == pytest.approx(expected, rel=1e-6)
    assert la.sigma_noise.item() == SIGMA_NOISE

    # A prior's unit belongs to the curvature at a noise of 1.
    of_curvature = SIGMA_NOISE**2 * (of_precision - prior)
    n_targets = N_EXAMPLES * 2
    expected = of_curvature.sum().item() / n_targets
    assert unit_of_priors(la) == pytest.approx(expected, rel=1e-6)
    assert la.prior_precision.item() == pytest.approx(prior)


# --- by the gradient of validation data -----------------------------------------------


@pytest.mark.parametrize("n_outputs", [1, 2])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_descent_ends_where_neither_prior_nor_noise_could_be_better(n_outputs, scale):
    la, _ = plain_regression(n_outputs)
    # What the model predicts here is off by a draw of a posterior, beside the noise:
    # without that, no prior would be too narrow.
    la.sigma_noise = scale
    la.prior_precision = 5 / scale**2
    X = normal_draws(60, 5, seed=7)
    f_drawn = la.function(0)(X).detach()
    y = f_drawn + scale * normal_draws(60, n_outputs, seed=8)
    batches = [(X, y)]
    statistics = la.predictive_statistics(batches, dtype=torch.float64)
    la.sigma_noise = 1.0
    # All examples in one batch: the objective of a step is then the loss of them all.
    descent = ValGD(
        val_loader=statistics,
        batch_size=60,
        n_steps=500,
        generator=generator(),
    )
    history = descent(la)
    objective = history.objective
    assert objective.min() < objective[0]
    for step in (0, 10, objective.argmin()):
        la.sigma_noise = history.sigma_noise[step].item()
        la.prior_precision = history.prior_precision[step]
        found = objective[step].item()
        assert loss_of(la, batches) == pytest.approx(found, rel=1e-6)

    best = la.hyperparameters
    lowest = objective.min().item()
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
    posterior = MultivariateNormal(zeros, f_var)
    apart = posterior.sample((n_samples,)).norm(dim=-1)
    # Two normals with one noise differ along the line between their means alone.
    halves = apart / (2 * la.sigma_noise)
    distances = 2 * Normal(0, 1).cdf(halves) - 1
    return distances.mean().item()


def sum_of_squares(la, X, n_outputs: int) -> torch.Tensor:
    """Sum squared residuals of the data that `plain_regression` is fitted to."""
    y = normal_draws(N_EXAMPLES, n_outputs, seed=1)
    residuals = la.predictive_moments(X).f_mu - y
    return residuals.square().sum()


@pytest.mark.parametrize("n_outputs", [1, 2])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("max_change", [0.05, 0.1])
def test_draws_of_numbers_change_by_as_much_as_is_allowed(
    structure, n_outputs, max_change
):
    la, X = plain_regression(n_outputs, structure)
    agreement = Agreement(
        train_loader=[X],
        max_change=max_change,
        n_samples=5_000,
        generator=generator(),
    )
    history = agreement(la)
    assert mean_distance(la, X) == pytest.approx(max_change, rel=0.03)
    assert history.objective[-1].item() == pytest.approx(max_change, rel=0.03)

    sigma_noise = la.sigma_noise.item()
    assert history.sigma_noise[-1] == pytest.approx(sigma_noise)
    of_precision = eigenvalues_of_precision(la)
    determined = (1 - la.prior_precision / of_precision).sum()
    n_targets = N_EXAMPLES * n_outputs
    variance = sum_of_squares(la, X, n_outputs) / (n_targets - determined)
    assert sigma_noise == pytest.approx(variance.sqrt().item(), rel=1e-5)


def test_of_one_number_the_distance_has_a_closed_form():
    la, X = plain_regression(1)
    agreement = Agreement(train_loader=[X], n_samples=5_000)
    agreement(la)
    _, f_var = la(X)
    # The mean of 2 Φ(|z| s / 2) - 1 over standard normal z.
    s = f_var.flatten().sqrt() / la.sigma_noise
    distances = 2 / math.pi * (s / 2).atan()
    assert distances.mean().item() == pytest.approx(0.1, rel=0.03)


def test_exact_curvature_determines_as_many_parameters_as_the_predictions_show():
    """In the linear-Gaussian model, `Σ e / (e + λ)` is the trace of the hat matrix."""
    la, X = plain_regression(2, "full")
    agreement = Agreement(train_loader=[X])
    agreement(la)
    _, f_var = la(X)
    variances = f_var.diagonal(dim1=1, dim2=2)
    determined = variances.sum() / la.sigma_noise**2
    n_targets = N_EXAMPLES * 2
    variance = sum_of_squares(la, X, 2) / (n_targets - determined)
    expected = variance.sqrt().item()
    assert la.sigma_noise.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("sigma_noise", [1e-3, 0.5, 1e3])
@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_agreement_prefers_no_unit(unit, sigma_noise):
    in_one, X = plain_regression(1)
    agreement = Agreement(train_loader=[X])
    agreement(in_one)

    la, _ = plain_regression(1)
    head = la.model.model.second
    for weight in (head.weight, head.bias, head.lora_B["default"].weight):
        weight.data.mul_(unit)
    la.sigma_noise = sigma_noise
    y = unit * normal_draws(N_EXAMPLES, 1, seed=1)
    la.fit([(X, y)])
    agreement(la)
    noises = la.sigma_noise / (unit * in_one.sigma_noise)
    assert noises.item() == pytest.approx(1, rel=0.01)
    deviations = la.predict(X).epistemic_std / (unit * in_one.predict(X).epistemic_std)
    assert deviations.mean().item() == pytest.approx(1, rel=0.1)


def test_residuals_that_tell_of_no_noise_are_refused():
    la, X = plain_regression(1)
    exact = la.predictive_moments(X).f_mu
    la.fit([(X, exact)])
    agreement = Agreement(train_loader=[X])
    with pytest.raises(ValueError, match=r"without any error.*second_training"):
        agreement(la)
    assert la.sigma_noise.item() == SIGMA_NOISE

    # So broad a prior lets the data determine as many parameters as there are targets.
    la, X = plain_regression(2)
    agreement = Agreement(train_loader=[X], max_change=0.6)
    message = r"have 24 targets, which leaves none.*second_training"
    with pytest.raises(ValueError, match=message):
        agreement(la)


# --- refused --------------------------------------------------------------------------


def test_targets_without_any_error_are_refused():
    la, X = plain_regression(1)
    # Rounded as the statistics round the means: every residual is exactly 0.
    y = la.predictive_moments(X).f_mu.float().double()
    statistics = la.predictive_statistics([(X, y)], dtype=torch.float32)
    search = GridSearch(val_loader=statistics)
    with pytest.raises(ValueError, match=r"without any error.*optimize_scale=False"):
        search(la)
    assert la.sigma_noise.item() == SIGMA_NOISE


def test_the_noise_alone_is_the_last_point():
    la, X = plain_regression(1)
    batches = validation(la, X, 1)
    search = GridSearch(val_loader=batches, **GRID)
    history = search(la)
    residuals = [y - la.predictive_moments(x).f_mu for x, y in batches]
    variance = torch.cat(residuals).square().mean().item()
    # The mean negative log-density of normals at the variance of their own residuals.
    expected = (math.log(2 * math.pi * variance) + 1) / 2
    assert history.objective[-1].item() == pytest.approx(expected, rel=1e-5)
