"""The noise of a regression, chosen together with the prior."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from laplace_lora_ext import (
    Agreement,
    GridSearch,
    TuningHistory,
    ValGD,
)
from laplace_lora_ext.tuning.noise import n_determined, unit_of_priors
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


class Batch(NamedTuple):
    """Inputs and targets."""

    X: Tensor
    y: Tensor


def residuals_of(
    la: Any,
    X: Tensor,
    y: Tensor,
) -> Tensor:
    """Compute what the model's means leave of the targets."""
    f_mu, _ = la.predictive_moments(X)
    return y - f_mu


def validation(
    la: Any,
    X: Tensor,
    scale: float = 1.0,
) -> list[Batch]:
    """Make targets with noise of a known size around the model."""
    f_mu, _ = la.predictive_moments(X)
    noise = normal(*f_mu.shape, seed=3)
    y = f_mu + scale * noise
    # Of unlike sizes, so that a mean of batches is not that of their examples.
    small = Batch(X[:5], y[:5])
    large = Batch(X[5:], y[5:])
    return [small, large]


def eigenvalues_of_precision(la: Any) -> Tensor:
    """Compute all eigenvalues of the posterior precision, whatever its structure."""
    P = la.posterior_precision
    if hasattr(P, "to_matrix"):
        P = P.to_matrix()
    elif P.ndim == 1:
        P = P.diag()
    return torch.linalg.eigvalsh(P)


def loss_of(
    la: Any,
    batches: list[Batch],
) -> float:
    """Average the negative log-density of the targets."""
    losses = []
    for X, y in batches:
        f_mu, f_var = la(X)
        identity = torch.eye(y.shape[1]).double()
        noise = la.sigma_noise**2 * identity
        predictive = MultivariateNormal(f_mu, f_var + noise)
        log_density = predictive.log_prob(y)
        losses.append(-log_density)
    of_examples = torch.cat(losses)
    return of_examples.mean().item()


def loss_at(
    la: Any,
    batches: list[Batch],
    *,
    prior_precision: Tensor,
    sigma_noise: float,
) -> float:
    """Average the negative log-density at a prior and a noise."""
    la.sigma_noise = sigma_noise
    la.prior_precision = prior_precision
    return loss_of(la, batches)


# --- by a grid ------------------------------------------------------------------------


def loss_beside(
    la: Any,
    batches: list[Batch],
    history: TuningHistory,
    point: int,
    factor: float,
) -> float:
    """Compute the loss at a point of a search, but for a factor of its noise."""
    prior_precision = history.prior_precision[point]
    sigma_noise = history.sigma_noise[point].item()
    return loss_at(
        la,
        batches,
        sigma_noise=factor * sigma_noise,
        # The search's priors are relative to the noise, which moves alone here.
        prior_precision=prior_precision / factor**2,
    )


@pytest.mark.parametrize(
    ("structure", "n_outputs"),
    [("lowrank_kron", 1), ("lowrank_kron", 2), ("kron", 2), ("diag", 1), ("full", 2)],
)
def test_each_prior_has_the_noise_that_is_best_for_it(structure, n_outputs):
    la, X = plain_regression(n_outputs, structure)
    batches = validation(la, X, scale=0.3)
    search = GridSearch(val_loader=batches, **GRID)
    history = search(la)
    # The last point is the noise alone, which has a test of its own.
    n_priors = GRID["grid_size"]
    assert len(history.objective) == n_priors + 1
    for point in range(n_priors):
        loss_times = partial(loss_beside, la, batches, history, point)
        loss = loss_times(1.0)
        objective = history.objective[point].item()
        assert loss == pytest.approx(objective, rel=1e-5)
        assert loss < loss_times(0.99)
        assert loss < loss_times(1.01)


def test_the_noise_alone_is_the_last_point():
    la, X = plain_regression(1)
    batches = validation(la, X)
    search = GridSearch(val_loader=batches, **GRID)
    history = search(la)
    of_batches = [residuals_of(la, *batch) for batch in batches]
    residuals = torch.cat(of_batches)
    variance = residuals.square().mean().item()
    # The mean negative log-density of normals at the variance of their own residuals.
    expected = (math.log(2 * math.pi * variance) + 1) / 2
    found = history.objective[-1].item()
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_noise_alone_leaves_no_variance_whatever_the_unit(scale):
    la, X = plain_regression(1)
    history = GridSearch(val_loader=validation(la, X, scale), **GRID)(la)
    for point, has_variance in ((-2, True), (-1, False)):
        la.hyperparameters = replace(history, choice=point).chosen
        assert ("without variance" not in repr(la)) == has_variance


@pytest.mark.parametrize(
    ("structure", "scale"),
    [("lowrank_kron", 1e-3), ("lowrank_kron", 1e3), ("kron", 1.0), ("diag", 1e3)],
)
def test_targets_of_any_scale_have_their_noise(structure, scale):
    la, X = plain_regression(1, structure)
    batches = validation(la, X, scale)
    search = GridSearch(val_loader=batches)
    search(la)
    _, f_var = la(X)
    noise_variance = la.sigma_noise**2
    variances = f_var.flatten() + noise_variance
    deviations = variances.sqrt()
    deviation = deviations.mean().item()
    # Chance moves the standard deviation of twelve draws by 1 / sqrt(24), or 20%.
    assert 0.5 < deviation / scale < 1.6


def test_targets_without_any_error_are_refused():
    la, X = plain_regression(1)
    f_mu, _ = la.predictive_moments(X)
    # Rounded as the statistics round the means: every residual is exactly 0.
    y = f_mu.float().double()
    statistics = la.predictive_statistics(
        [(X, y)],
        dtype=torch.float32,
    )
    search = GridSearch(val_loader=statistics)
    message = r"without any error.*optimize_scale=False"
    with pytest.raises(ValueError, match=message):
        search(la)
    assert la.sigma_noise.item() == SIGMA_NOISE


# --- what data determine --------------------------------------------------------------


# Another than 1, which divides nothing.
PRIOR_PRECISION = 0.3


@pytest.mark.parametrize("structure", STRUCTURES)
def test_what_data_determine_and_a_priors_unit_are_told_by_eigenvalues(structure):
    la, _ = plain_regression(2, structure)
    la.prior_precision = PRIOR_PRECISION
    of_precision = eigenvalues_of_precision(la)
    of_prior = PRIOR_PRECISION / of_precision
    determined = 1 - of_prior
    expected = determined.sum().item()
    found = n_determined(la)
    assert found == pytest.approx(expected, rel=1e-6)

    # The unit is of the curvature at a noise of 1.
    of_curvature = of_precision - PRIOR_PRECISION
    at_noise_of_one = SIGMA_NOISE**2 * of_curvature
    trace = at_noise_of_one.sum().item()
    n_targets = N_EXAMPLES * 2
    expected = trace / n_targets
    found = unit_of_priors(la)
    assert found == pytest.approx(expected, rel=1e-6)
    # Both are left as they were, without a graph.
    assert not la.sigma_noise.requires_grad
    assert la.sigma_noise.item() == SIGMA_NOISE
    prior_precision = la.prior_precision.item()
    # The prior precision is a number of float32.
    assert prior_precision == pytest.approx(PRIOR_PRECISION)


# --- by the gradient of validation data -----------------------------------------------


@dataclass(frozen=True)
class Descent:
    """What a descent has gone through, and where it ended."""

    la: Any
    batches: list[Batch]
    history: Any
    scale: float  # the noise of the targets
    prior_precision: Tensor
    sigma_noise: float


# Of the module, for it takes 500 steps.
@pytest.fixture(
    scope="module",
    params=[(1e-3, 1), (1e3, 2)],
    ids=str,
)
def descent(request: pytest.FixtureRequest) -> Descent:
    """A descent by all examples at each step, towards a noise that is known.

    An objective of a step is then the loss of all examples.
    """
    scale, n_outputs = request.param
    la, _ = plain_regression(n_outputs)
    # What the model predicts here is off by a draw of a posterior, beside the noise:
    # without that, no prior would be too narrow.
    la.sigma_noise = scale
    la.prior_precision = 5 / scale**2
    X = normal(60, 5, seed=7)
    function = la.function(seed=0)
    noise = normal(60, n_outputs, seed=8)
    y = function(X).detach() + scale * noise
    batches = [Batch(X, y)]
    statistics = la.predictive_statistics(
        batches,
        dtype=torch.float64,
    )
    la.sigma_noise = 1.0
    method = ValGD(
        val_loader=statistics,
        batch_size=60,
        n_steps=500,
        generator=generator(),
    )
    history = method(la)
    return Descent(
        la=la,
        batches=batches,
        history=history,
        scale=scale,
        prior_precision=la.prior_precision.clone(),
        sigma_noise=la.sigma_noise.item(),
    )


def test_objectives_of_a_descent_are_losses(descent):
    history = descent.history
    best = history.objective.argmin()
    # Otherwise there would be no descent.
    assert best > 0
    for step in (0, 10, best):
        sigma_noise = history.sigma_noise[step]
        loss = loss_at(
            descent.la,
            descent.batches,
            prior_precision=history.prior_precision[step],
            sigma_noise=sigma_noise.item(),
        )
        expected = history.objective[step].item()
        assert loss == pytest.approx(expected, rel=1e-6)

    # It ends where neither prior nor noise could be better.
    lowest = history.objective.min()
    for factor in (0.9, 1.1):
        of_another_noise = loss_at(
            descent.la,
            descent.batches,
            prior_precision=descent.prior_precision,
            sigma_noise=factor * descent.sigma_noise,
        )
        of_another_prior = loss_at(
            descent.la,
            descent.batches,
            prior_precision=factor * descent.prior_precision,
            sigma_noise=descent.sigma_noise,
        )
        assert of_another_noise > lowest
        assert of_another_prior > lowest
    found = descent.sigma_noise
    # Three standard errors, which are 1 / sqrt(120), of the noise of sixty draws.
    assert found == pytest.approx(descent.scale, rel=0.3)


# --- by agreement ---------------------------------------------------------------------


N_SAMPLES = 5_000
"""Draws of an agreement: enough to compare its change with the exact one to 3%."""


def mean_distance(
    la: Any,
    X: Tensor,
    n_samples: int = 20_000,
) -> float:
    """Average draws' total variation distance from the model."""
    torch.manual_seed(1)
    _, f_var = la(X)
    n_outputs = f_var.shape[-1]
    zeros = torch.zeros(n_outputs).double()
    posterior = MultivariateNormal(zeros, f_var)
    deviations = posterior.sample((n_samples,))
    apart = deviations.norm(dim=-1)
    # Two normals with one noise differ along the line between their means alone.
    halves = apart / (2 * la.sigma_noise)
    normal_distribution = Normal(0, 1)
    below = normal_distribution.cdf(halves)
    distances = 2 * below - 1
    return distances.mean().item()


def noise_of_residuals(
    la: Any,
    X: Tensor,
    n_outputs: int,
    determined: Tensor,
) -> float:
    """Estimate the noise of the data that `plain_regression` is fitted to.

    Parameters that the data determine take as many degrees of freedom.
    """
    y = normal(N_EXAMPLES, n_outputs, seed=1)
    residuals = residuals_of(la, X, y)
    sum_of_squares = residuals.square().sum()
    n_targets = N_EXAMPLES * n_outputs
    variance = sum_of_squares / (n_targets - determined)
    return variance.sqrt().item()


@pytest.mark.parametrize(
    ("structure", "n_outputs", "max_change"),
    [
        ("lowrank_kron", 1, 0.05),
        ("lowrank_kron", 2, 0.1),
        ("kron", 2, 0.05),
        ("diag", 1, 0.1),
        ("full", 2, 0.1),
    ],
)
def test_an_agreement_allows_a_change_and_takes_the_noise_of_residuals(
    structure, n_outputs, max_change
):
    la, X = plain_regression(n_outputs, structure)
    agreement = Agreement(
        train_loader=[X],
        max_change=max_change,
        n_samples=N_SAMPLES,
        generator=generator(),
    )
    history = agreement(la)
    distance = mean_distance(la, X)
    assert distance == pytest.approx(max_change, rel=0.03)
    last = history.objective[-1].item()
    assert last == pytest.approx(max_change, rel=0.03)

    of_precision = eigenvalues_of_precision(la)
    of_prior = la.prior_precision / of_precision
    determined = 1 - of_prior
    expected = noise_of_residuals(
        la,
        X,
        n_outputs,
        determined.sum(),
    )
    sigma_noise = la.sigma_noise.item()
    assert sigma_noise == pytest.approx(expected, rel=1e-5)
    assert history.sigma_noise[-1] == pytest.approx(sigma_noise)


def test_of_one_number_the_distance_has_a_closed_form():
    la, X = plain_regression(1)
    agreement = Agreement(
        train_loader=[X],
        n_samples=N_SAMPLES,
    )
    agreement(la)
    _, f_var = la(X)
    deviations = f_var.flatten().sqrt()
    s = deviations / la.sigma_noise
    # The mean of 2 Φ(|z| s / 2) - 1 over standard normal z.
    distances = 2 / math.pi * torch.atan(s / 2)
    found = distances.mean().item()
    # The change that is allowed unless told otherwise.
    assert found == pytest.approx(0.1, rel=0.03)


def test_exact_curvature_determines_as_many_parameters_as_the_predictions_show():
    """In the linear-Gaussian model, `Σ e / (e + λ)` is the trace of the hat matrix."""
    la, X = plain_regression(2, "full")
    agreement = Agreement(train_loader=[X])
    agreement(la)
    _, f_var = la(X)
    variances = f_var.diagonal(dim1=1, dim2=2)
    noise_variance = la.sigma_noise**2
    trace = variances.sum() / noise_variance
    expected = noise_of_residuals(
        la,
        X,
        n_outputs=2,
        determined=trace,
    )
    found = la.sigma_noise.item()
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("unit", "sigma_noise"), [(1e-6, 1e3), (1.0, 1e-3), (1e6, 0.5)]
)
def test_agreement_prefers_no_unit(unit, sigma_noise):
    in_one, X = plain_regression(1)
    agreement = Agreement(train_loader=[X])
    agreement(in_one)

    la, _ = plain_regression(1)
    head = la.model.model.second
    lora_B = head.lora_B["default"]
    # What its predictions are proportional to.
    for weight in (head.weight, head.bias, lora_B.weight):
        weight.data.mul_(unit)
    la.sigma_noise = sigma_noise
    targets = normal(N_EXAMPLES, 1, seed=1)
    batch = Batch(X, unit * targets)
    la.fit([batch])
    agreement(la)

    expected_noise = unit * in_one.sigma_noise.item()
    found_noise = la.sigma_noise.item()
    assert found_noise == pytest.approx(expected_noise, rel=0.01)
    expected = in_one.predict(X)
    found = la.predict(X)
    deviations = found.epistemic_std / expected.epistemic_std
    mean_deviation = deviations.mean().item()
    # The prior was chosen by no more than a hundred draws of the posterior.
    assert mean_deviation == pytest.approx(unit, rel=0.1)


def test_training_targets_without_any_error_are_refused():
    la, X = plain_regression(1)
    exact, _ = la.predictive_moments(X)
    la.fit([Batch(X, exact)])
    agreement = Agreement(train_loader=[X])
    message = r"without any error.*second_training"
    with pytest.raises(ValueError, match=message):
        agreement(la)
    assert la.sigma_noise.item() == SIGMA_NOISE


def test_as_many_determined_parameters_as_targets_are_refused():
    la, X = plain_regression(2)
    # So much change asks for so broad a prior.
    agreement = Agreement(train_loader=[X], max_change=0.6)
    message = r"have 24 targets, which leaves none.*second_training"
    with pytest.raises(ValueError, match=message):
        agreement(la)
