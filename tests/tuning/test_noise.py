"""The noise of a regression, chosen together with the prior."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributions import MultivariateNormal, Normal

from laplace_lora_ext import Agreement, GridSearch, ValGD
from laplace_lora_ext.tuning.noise import n_determined, unit_of_priors
from tests.support.posteriors import GRID, STRUCTURES, generator, plain_regression

# Of `plain_regression`, which is fitted with this noise.
N_EXAMPLES = 12
SIGMA_NOISE = 0.5


Batches = list[tuple[torch.Tensor, torch.Tensor]]


def normal_draws(
    n: int,
    n_outputs: int,
    seed: int,
) -> torch.Tensor:
    """Draw standard normal numbers `(n, n_outputs)` in float64."""
    drawn = torch.randn(n, n_outputs, generator=generator(seed))
    return drawn.double()


def residuals_of(
    la: Any,
    X: torch.Tensor,
    y: torch.Tensor,
) -> torch.Tensor:
    """Compute what the model's means leave of the targets."""
    f_mu, _ = la.predictive_moments(X)
    return y - f_mu


def validation(
    la: Any,
    X: torch.Tensor,
    scale: float = 1.0,
) -> Batches:
    """Make targets with noise of a known size around the model."""
    f_mu, _ = la.predictive_moments(X)
    noise = normal_draws(*f_mu.shape, seed=3)
    y = f_mu + scale * noise
    small = (X[:5], y[:5])
    large = (X[5:], y[5:])
    return [small, large]


def eigenvalues_of_precision(la: Any) -> torch.Tensor:
    """Compute all eigenvalues of the posterior precision, whatever its structure."""
    P = la.posterior_precision
    if hasattr(P, "to_matrix"):
        P = P.to_matrix()
    elif P.ndim == 1:
        P = P.diag()
    return torch.linalg.eigvalsh(P)


def loss_of(
    la: Any,
    batches: Batches,
) -> float:
    """Average the negative log-density of the targets."""
    losses = []
    for X, y in batches:
        f_mu, f_var = la(X)
        n_outputs = y.shape[1]
        noise = la.sigma_noise**2 * torch.eye(n_outputs).double()
        predictive = MultivariateNormal(f_mu, f_var + noise)
        losses.append(-predictive.log_prob(y))
    return torch.cat(losses).mean().item()


def loss_at(
    la: Any,
    batches: Batches,
    *,
    prior_precision: torch.Tensor,
    sigma_noise: float,
) -> float:
    """Average the negative log-density at a prior and a noise."""
    la.sigma_noise = sigma_noise
    la.prior_precision = prior_precision
    return loss_of(la, batches)


# --- by a grid ------------------------------------------------------------------------


@pytest.mark.parametrize("n_outputs", [1, 2])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_each_prior_has_the_noise_that_is_best_for_it(structure, n_outputs):
    la, X = plain_regression(n_outputs, structure)
    batches = validation(la, X, scale=0.3)
    search = GridSearch(val_loader=batches, **GRID)
    history = search(la)
    # The last point is the noise alone, which has a test of its own.
    n_priors = GRID["grid_size"]
    assert len(history.objective) == n_priors + 1
    for point in range(n_priors):
        prior_precision = history.prior_precision[point]
        noise = history.sigma_noise[point].item()
        losses = {}
        for factor in (0.99, 1.0, 1.01):
            losses[factor] = loss_at(
                la,
                batches,
                sigma_noise=factor * noise,
                # The search's priors are relative to the noise, which moves alone here.
                prior_precision=prior_precision / factor**2,
            )
        objective = history.objective[point].item()
        assert losses[1.0] == pytest.approx(objective, rel=1e-5)
        assert losses[1.0] < losses[0.99]
        assert losses[1.0] < losses[1.01]


def test_the_noise_alone_is_the_last_point():
    la, X = plain_regression(1)
    batches = validation(la, X)
    search = GridSearch(val_loader=batches, **GRID)
    history = search(la)
    residuals = [residuals_of(la, *batch) for batch in batches]
    variance = torch.cat(residuals).square().mean().item()
    # The mean negative log-density of normals at the variance of their own residuals.
    expected = (math.log(2 * math.pi * variance) + 1) / 2
    found = history.objective[-1].item()
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_targets_of_any_scale_have_their_noise(structure, scale):
    la, X = plain_regression(1, structure)
    batches = validation(la, X, scale)
    search = GridSearch(val_loader=batches)
    search(la)
    _, f_var = la(X)
    variance = f_var.flatten() + la.sigma_noise**2
    deviation = variance.sqrt().mean().item()
    # Chance moves the standard deviation of twelve draws by 1 / sqrt(24), or 20%.
    assert 0.5 < deviation / scale < 1.6


def test_targets_without_any_error_are_refused():
    la, X = plain_regression(1)
    f_mu, _ = la.predictive_moments(X)
    # Rounded as the statistics round the means: every residual is exactly 0.
    y = f_mu.float().double()
    statistics = la.predictive_statistics([(X, y)], dtype=torch.float32)
    search = GridSearch(val_loader=statistics)
    message = r"without any error.*optimize_scale=False"
    with pytest.raises(ValueError, match=message):
        search(la)
    assert la.sigma_noise.item() == SIGMA_NOISE


# --- what data determine --------------------------------------------------------------


@pytest.fixture(params=STRUCTURES)
def at_a_prior(request: pytest.FixtureRequest):
    """A regression with two outputs of each structure, at a prior precision of 0.3."""
    la, _ = plain_regression(2, request.param)
    la.prior_precision = 0.3
    return la


def test_parameters_that_data_determine_are_counted_by_eigenvalues(at_a_prior):
    of_precision = eigenvalues_of_precision(at_a_prior)
    expected = (1 - 0.3 / of_precision).sum().item()
    found = n_determined(at_a_prior)
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_priors_unit_belongs_to_the_curvature_at_a_noise_of_one(at_a_prior):
    of_precision = eigenvalues_of_precision(at_a_prior)
    of_curvature = SIGMA_NOISE**2 * (of_precision - 0.3)
    n_targets = N_EXAMPLES * 2
    expected = of_curvature.sum().item() / n_targets
    found = unit_of_priors(at_a_prior)
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("ask", [n_determined, unit_of_priors])
def test_prior_and_noise_are_left_as_they_were(at_a_prior, ask):
    ask(at_a_prior)
    assert at_a_prior.sigma_noise.item() == SIGMA_NOISE
    # The prior precision is a number of float32.
    assert at_a_prior.prior_precision.item() == pytest.approx(0.3)


# --- by the gradient of validation data -----------------------------------------------


@dataclass(frozen=True)
class Descent:
    """What a descent has gone through, and where it ended."""

    la: Any
    batches: Batches
    history: Any
    scale: float  # the noise of the targets
    prior_precision: torch.Tensor
    sigma_noise: float

    @property
    def objective(self) -> torch.Tensor:
        """The losses, step by step."""
        return self.history.objective


# Of the module, for it takes 500 steps.
@pytest.fixture(
    scope="module",
    params=itertools.product([1e-3, 1.0, 1e3], [1, 2]),
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
    X = normal_draws(60, 5, seed=7)
    noise = normal_draws(60, n_outputs, seed=8)
    y = la.function(0)(X).detach() + scale * noise
    batches = [(X, y)]
    statistics = la.predictive_statistics(batches, dtype=torch.float64)
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
    objective = descent.objective
    assert objective.min() < objective[0]
    for step in (0, 10, objective.argmin()):
        loss = loss_at(
            descent.la,
            descent.batches,
            prior_precision=descent.history.prior_precision[step],
            sigma_noise=descent.history.sigma_noise[step].item(),
        )
        expected = objective[step].item()
        assert loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_descent_ends_where_neither_prior_nor_noise_could_be_better(descent, factor):
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
    lowest = descent.objective.min()
    assert of_another_noise > lowest
    assert of_another_prior > lowest


def test_a_descent_finds_the_noise_of_the_targets(descent):
    # Three standard errors, which are 1 / sqrt(120), of the noise of sixty draws.
    assert descent.sigma_noise == pytest.approx(descent.scale, rel=0.3)


# --- by agreement ---------------------------------------------------------------------


N_SAMPLES = 5_000
"""Draws of an agreement: enough to compare its change with the exact one to 3%."""


def mean_distance(
    la: Any,
    X: torch.Tensor,
    n_samples: int = 20_000,
) -> float:
    """Average draws' total variation distance from the model."""
    torch.manual_seed(1)
    _, f_var = la(X)
    n_outputs = f_var.shape[-1]
    zeros = torch.zeros(n_outputs).double()
    posterior = MultivariateNormal(zeros, f_var)
    apart = posterior.sample((n_samples,)).norm(dim=-1)
    # Two normals with one noise differ along the line between their means alone.
    halves = apart / (2 * la.sigma_noise)
    distances = 2 * Normal(0, 1).cdf(halves) - 1
    return distances.mean().item()


def noise_of_residuals(
    la: Any,
    X: torch.Tensor,
    n_outputs: int,
    determined: torch.Tensor,
) -> float:
    """Estimate the noise of the data that `plain_regression` is fitted to.

    Parameters that the data determine take as many degrees of freedom.
    """
    y = normal_draws(N_EXAMPLES, n_outputs, seed=1)
    sum_of_squares = residuals_of(la, X, y).square().sum()
    n_targets = N_EXAMPLES * n_outputs
    variance = sum_of_squares / (n_targets - determined)
    return variance.sqrt().item()


@dataclass(frozen=True)
class Agreed:
    """A regression whose prior and noise an agreement has chosen, and its inputs."""

    la: Any
    X: torch.Tensor
    n_outputs: int
    max_change: float
    history: Any


# Of the module, for it takes so many draws.
@pytest.fixture(
    scope="module",
    params=itertools.product(STRUCTURES, [1, 2], [0.05, 0.1]),
    ids=str,
)
def agreed(request: pytest.FixtureRequest) -> Agreed:
    """An agreement of each structure, number of outputs, and change."""
    structure, n_outputs, max_change = request.param
    la, X = plain_regression(n_outputs, structure)
    agreement = Agreement(
        train_loader=[X],
        max_change=max_change,
        n_samples=N_SAMPLES,
        generator=generator(),
    )
    history = agreement(la)
    return Agreed(la, X, n_outputs, max_change, history)


def test_draws_of_numbers_change_by_as_much_as_is_allowed(agreed):
    expected = pytest.approx(agreed.max_change, rel=0.03)
    assert mean_distance(agreed.la, agreed.X) == expected
    objective = agreed.history.objective[-1].item()
    assert objective == expected


def test_an_agreements_noise_is_that_of_the_residuals(agreed):
    la = agreed.la
    of_precision = eigenvalues_of_precision(la)
    determined = (1 - la.prior_precision / of_precision).sum()
    expected = noise_of_residuals(la, agreed.X, agreed.n_outputs, determined)
    sigma_noise = la.sigma_noise.item()
    assert sigma_noise == pytest.approx(expected, rel=1e-5)
    last = agreed.history.sigma_noise[-1]
    assert last == pytest.approx(sigma_noise)


def test_of_one_number_the_distance_has_a_closed_form():
    la, X = plain_regression(1)
    agreement = Agreement(train_loader=[X], n_samples=N_SAMPLES)
    agreement(la)
    _, f_var = la(X)
    # The mean of 2 Φ(|z| s / 2) - 1 over standard normal z.
    s = f_var.flatten().sqrt() / la.sigma_noise
    distances = 2 / math.pi * (s / 2).atan()
    # The change that is allowed unless told otherwise.
    assert distances.mean().item() == pytest.approx(0.1, rel=0.03)


def test_exact_curvature_determines_as_many_parameters_as_the_predictions_show():
    """In the linear-Gaussian model, `Σ e / (e + λ)` is the trace of the hat matrix."""
    la, X = plain_regression(2, "full")
    agreement = Agreement(train_loader=[X])
    agreement(la)
    _, f_var = la(X)
    variances = f_var.diagonal(dim1=1, dim2=2)
    trace = variances.sum() / la.sigma_noise**2
    expected = noise_of_residuals(la, X, n_outputs=2, determined=trace)
    assert la.sigma_noise.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("sigma_noise", [1e-3, 0.5, 1e3])
@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_agreement_prefers_no_unit(unit, sigma_noise):
    in_one, X = plain_regression(1)
    agreement = Agreement(train_loader=[X])
    agreement(in_one)

    la, _ = plain_regression(1)
    head = la.model.model.second
    lora_B = head.lora_B["default"]
    for weight in (head.weight, head.bias, lora_B.weight):
        weight.data.mul_(unit)
    la.sigma_noise = sigma_noise
    y = unit * normal_draws(N_EXAMPLES, 1, seed=1)
    la.fit([(X, y)])
    agreement(la)

    noises = la.sigma_noise / (unit * in_one.sigma_noise)
    assert noises.item() == pytest.approx(1, rel=0.01)
    expected = unit * in_one.predict(X).epistemic_std
    deviations = la.predict(X).epistemic_std / expected
    # The prior was chosen by no more than a hundred draws of the posterior.
    assert deviations.mean().item() == pytest.approx(1, rel=0.1)


def test_training_targets_without_any_error_are_refused():
    la, X = plain_regression(1)
    exact, _ = la.predictive_moments(X)
    la.fit([(X, exact)])
    agreement = Agreement(train_loader=[X])
    with pytest.raises(ValueError, match=r"without any error.*second_training"):
        agreement(la)
    assert la.sigma_noise.item() == SIGMA_NOISE


def test_as_many_determined_parameters_as_targets_are_refused():
    la, X = plain_regression(2)
    # So much change asks for so broad a prior.
    agreement = Agreement(train_loader=[X], max_change=0.6)
    message = r"have 24 targets, which leaves none.*second_training"
    with pytest.raises(ValueError, match=message):
        agreement(la)
