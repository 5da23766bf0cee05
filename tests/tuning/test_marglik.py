"""The evidence at the trained weights."""

import warnings

import pytest
import torch
from torch.testing import assert_close

from tests.support.dense import evidence
from tests.support.models import ragged_batches
from tests.support.posteriors import (
    STRUCTURES,
    fitted,
    plain_regression,
    sizes,
)


def differentiable(value) -> torch.Tensor:
    return torch.as_tensor(value).clone().requires_grad_()


def slope(value: torch.Tensor) -> float:
    """Find an evidence's steepest slope, in nats a factor of e."""
    return (value.grad * value).abs().max().item()


def test_the_noise_of_a_regression_is_tuned_with_the_prior():
    la, _ = plain_regression()
    before = la.log_marginal_likelihood().item()
    la.optimize_prior_precision(optimize_sigma_noise=True, n_steps=3000)
    prior = differentiable(la.prior_precision)
    sigma = differentiable(la.sigma_noise)
    evidence = la.log_marginal_likelihood(prior, sigma)
    evidence.backward()
    assert evidence.item() > before
    assert slope(prior) < 0.05
    assert slope(sigma) < 0.05


@pytest.mark.parametrize(
    ("prior", "tail", "dtype"),
    [
        ("scalar", True, torch.float64),
        ("scalar", False, torch.float32),
        ("layerwise", True, torch.float32),
    ],
)
def test_the_evidence_converges(dtype, tail, prior):
    """Its slope is 0 where the search ends, and no point of a grid is higher."""
    la = fitted(dtype=dtype, tail=tail)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # there is a maximum
        history = la.optimize_prior_precision(prior_structure=prior, n_steps=3000)
    assert 11 < len(history.objective) < 3000
    precision = differentiable(la.prior_precision)
    la.log_marginal_likelihood(precision).backward()
    assert slope(precision) < 0.05
    la.prior_precision = precision.detach()
    final = la.log_marginal_likelihood().item()
    last = history.objective[-1].item()
    assert last == pytest.approx(final, abs=1e-6)
    assert history.objective.max().item() <= final + 1e-2
    last_prior = history.prior_precision[-1].to(dtype)
    assert_close(last_prior, la.prior_precision)
    if prior == "scalar":
        for point in torch.logspace(-4, 4, 81):
            assert la.log_marginal_likelihood(point).item() <= final + 1e-3


def test_an_evidence_that_still_changes_is_said():
    with pytest.warns(UserWarning, match="has not converged in 3 steps"):
        fitted().optimize_prior_precision(n_steps=3)


def n_weights_of(prior: str, la) -> torch.Tensor:
    """How many weights each precision of a prior is for."""
    if prior == "scalar":
        return torch.tensor([la.n_params])
    if prior == "layerwise":
        return torch.tensor(sizes(la))
    return torch.ones(la.n_params, dtype=torch.long)


@pytest.mark.parametrize("prior", ["scalar", "layerwise", "diagonal"])
def test_a_prior_is_the_gaussian_with_these_precisions(prior):
    la = fitted(structure="diag")  # it takes any prior
    n_weights = n_weights_of(prior, la)
    precision = torch.linspace(0.5, 3.0, len(n_weights), dtype=torch.float64)
    la.prior_precision = precision
    la.prior_mean = 0.1
    of_weights = precision.repeat_interleave(n_weights)
    assert_close(la.log_det_prior_precision, of_weights.log().sum())
    scatter = of_weights @ (la.mean - 0.1).square()
    assert_close(la.scatter, scatter)


def dense_curvature(la, structure: str) -> torch.Tensor:
    if structure == "diag":
        return la.H.diag()
    if structure == "full":
        return la.H
    return la.H.to_matrix()


def climbed(objective, n_precisions: int):
    """Precisions after fifty steps of Adam, and the objective before each."""
    logarithm = torch.zeros(n_precisions, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logarithm], lr=0.1)
    values = []
    for _ in range(50):
        optimizer.zero_grad()
        value = objective(logarithm.exp())
        (-value).backward()
        optimizer.step()
        values.append(value.detach())
    return logarithm.detach().exp(), torch.stack(values)


OF_BLOCKS = [(structure, "layerwise") for structure in STRUCTURES]


@pytest.mark.parametrize(("structure", "prior"), [*OF_BLOCKS, ("diag", "diagonal")])
def test_fifty_steps_of_a_users_own_on_the_evidence_are_those_on_a_dense_one(
    structure, prior
):
    la = fitted(structure=structure)
    n_weights = n_weights_of(prior, la)
    H = dense_curvature(la, structure)

    def of_dense(precision):
        of_weights = precision.repeat_interleave(n_weights)
        return evidence(H, la.log_likelihood, la.mean, of_weights)

    precision, values = climbed(la.log_marginal_likelihood, len(n_weights))
    expected_precision, expected_values = climbed(of_dense, len(n_weights))
    assert_close(precision, expected_precision, rtol=1e-6, atol=1e-8)
    assert_close(values, expected_values, rtol=1e-6, atol=1e-8)
    assert values[-1] > values[0] + 1
    la.prior_precision = precision
    assert torch.isfinite(la(ragged_batches()[0])).all()
