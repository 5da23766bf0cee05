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


def differentiable(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone().requires_grad_()


def steepness(evidence: torch.Tensor, value: torch.Tensor) -> float:
    """Find an evidence's steepest slope in logarithms, in nats a factor of e."""
    (gradient,) = torch.autograd.grad(evidence, value, retain_graph=True)
    return (gradient * value).abs().max().item()


def test_the_noise_of_a_regression_is_tuned_with_the_prior():
    la, _ = plain_regression()
    before = la.log_marginal_likelihood().item()
    la.optimize_prior_precision(optimize_sigma_noise=True, n_steps=3000)
    prior = differentiable(la.prior_precision)
    noise = differentiable(la.sigma_noise)
    best = la.log_marginal_likelihood(prior, noise)
    assert best.item() > before
    assert steepness(best, prior) < 0.05
    assert steepness(best, noise) < 0.05


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
    last_prior = history.prior_precision[-1].to(dtype)
    assert_close(last_prior, la.prior_precision)

    precision = differentiable(la.prior_precision)
    final = la.log_marginal_likelihood(precision)
    assert steepness(final, precision) < 0.05
    highest = final.item()
    assert history.objective[-1].item() == pytest.approx(highest, abs=1e-6)
    # Steps before the last may have come a little nearer.
    assert history.objective.max().item() <= highest + 1e-2
    if prior == "scalar":
        for point in torch.logspace(-4, 4, 81):
            assert la.log_marginal_likelihood(point).item() <= highest + 1e-3


def test_an_evidence_that_still_changes_is_said():
    with pytest.warns(UserWarning, match="has not converged in 3 steps"):
        fitted().optimize_prior_precision(n_steps=3)


def n_weights_of(prior: str, la) -> torch.Tensor:
    """Count the weights that each precision of a prior is for."""
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
    log_det = of_weights.log().sum()
    assert_close(la.log_det_prior_precision, log_det)
    scatter = of_weights @ (la.mean - 0.1).square()
    assert_close(la.scatter, scatter)


def dense_curvature(la, structure: str) -> torch.Tensor:
    if structure == "diag":
        return la.H.diag()
    if structure == "full":
        return la.H
    return la.H.to_matrix()


def climbed(objective, n_precisions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Take fifty steps of Adam; return precisions and the objective before each."""
    logarithms = torch.zeros(n_precisions, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logarithms], lr=0.1, maximize=True)
    values = []
    for _ in range(50):
        optimizer.zero_grad()
        value = objective(logarithms.exp())
        value.backward()
        optimizer.step()
        values.append(value.detach())
    precisions = logarithms.detach().exp()
    return precisions, torch.stack(values)


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

    found, values = climbed(la.log_marginal_likelihood, len(n_weights))
    expected, expected_values = climbed(of_dense, len(n_weights))
    assert_close(found, expected, rtol=1e-6, atol=1e-8)
    assert_close(values, expected_values, rtol=1e-6, atol=1e-8)
    assert values[-1] > values[0] + 1
    # Numbers that a user has differentiated can be set.
    la.prior_precision = found
    assert torch.isfinite(la(ragged_batches()[0])).all()
