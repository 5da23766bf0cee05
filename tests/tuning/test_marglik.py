"""The evidence at the trained weights."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.support.dense import curvature_of, evidence
from tests.support.models import first_batch
from tests.support.posteriors import STRUCTURES, fitted, plain_regression, sizes


def steepness(evidence: Tensor, value: Tensor) -> float:
    """Find an evidence's steepest slope in logarithms, in nats a factor of e."""
    # Others of its arguments may be asked about too.
    (gradient,) = torch.autograd.grad(evidence, value, retain_graph=True)
    return (gradient * value).abs().max().item()


# --- where the search ends ------------------------------------------------------------


@pytest.mark.parametrize("structure", ["lowrank_kron", "kron"])
def test_the_prior_of_a_regression_is_tuned_at_its_noise(structure):
    la, _ = plain_regression(structure=structure)
    before = la.log_marginal_likelihood().item()
    la.optimize_prior_precision(n_steps=3000)
    assert la.sigma_noise.item() == 0.5
    prior = la.prior_precision.clone().requires_grad_()
    noise = la.sigma_noise.clone().requires_grad_()
    best = la.log_marginal_likelihood(prior, noise)
    assert best.item() > before
    assert steepness(best, prior) < 0.05
    # The host's product of factors with a number has no derivative in it.
    (slope,) = torch.autograd.grad(best, noise)
    low, high = (la.log_marginal_likelihood(prior, noise + d) for d in (-1e-5, 1e-5))
    assert slope.item() == pytest.approx((high - low).item() / 2e-5, rel=1e-4)


@pytest.mark.parametrize(
    ("prior", "tail", "dtype"),
    [("scalar", True, torch.float64), ("layerwise", False, torch.float32)],
)
def test_a_search_ends_where_the_evidence_is_highest(prior, tail, dtype):
    la = fitted(dtype=dtype, tail=tail)
    with pytest.warns(UserWarning, match="not converged in 3 steps"):
        la.optimize_prior_precision(prior_structure=prior, n_steps=3)
    with warnings.catch_warnings():
        # That it has not converged would be said.
        warnings.simplefilter("error")
        history = la.optimize_prior_precision(prior_structure=prior, n_steps=3000)
    # It stops where nothing changes any more, and takes the last.
    assert 11 < len(history.trials) < 3000
    chosen = la.prior_precision.clone().requires_grad_()
    assert_close(history.prior_precision[-1].to(chosen), chosen.detach())
    highest = la.log_marginal_likelihood(chosen)
    assert history.objective[-1].item() == pytest.approx(highest.item(), abs=1e-6)
    # Steps before the last may have come a little nearer.
    assert history.objective.max() <= highest + 1e-2
    assert steepness(highest, chosen) < 0.05
    # A layerwise prior may be any scalar.
    for point in torch.logspace(-4, 4, 81):
        assert la.log_marginal_likelihood(point) <= highest + 1e-3


# --- against dense algebra ------------------------------------------------------------


def n_weights_of(prior: str, la: Any) -> Tensor:
    """Count the weights that each precision of a prior is for."""
    if prior == "scalar":
        return torch.tensor([la.n_params])
    if prior == "layerwise":
        return torch.tensor(sizes(la))
    return torch.ones(la.n_params, dtype=torch.long)


@pytest.mark.parametrize("prior", ["scalar", "layerwise", "diagonal"])
def test_a_prior_is_the_gaussian_with_these_precisions(prior):
    # This structure takes any prior.
    la = fitted(structure="diag")
    n_weights = n_weights_of(prior, la)
    la.prior_precision = torch.linspace(0.5, 3.0, len(n_weights)).double()
    la.prior_mean = 0.1
    of_weights = la.prior_precision.repeat_interleave(n_weights)
    assert_close(la.log_det_prior_precision, of_weights.log().sum())
    assert_close(la.scatter, of_weights @ (la.mean - 0.1).square())


def climbed(
    objective: Callable[[Tensor], Tensor], n_precisions: int
) -> tuple[Tensor, Tensor]:
    """Take fifty steps of Adam from precisions of 1, as a user may.

    Returns where they end, and the objective before each.
    """
    logarithms = torch.zeros(n_precisions, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logarithms], lr=0.1, maximize=True)
    values = []
    for _ in range(50):
        optimizer.zero_grad()
        value = objective(logarithms.exp())
        value.backward()
        optimizer.step()
        values.append(value.detach())
    return logarithms.detach().exp(), torch.stack(values)


@pytest.mark.parametrize(
    ("structure", "prior"),
    [*((structure, "layerwise") for structure in STRUCTURES), ("diag", "diagonal")],
)
def test_fifty_steps_of_a_users_own_on_the_evidence_are_those_on_a_dense_one(
    structure, prior
):
    la = fitted(structure=structure)
    n_weights = n_weights_of(prior, la)
    H = curvature_of(la)

    def of_dense(precision: Tensor) -> Tensor:
        of_weights = precision.repeat_interleave(n_weights)
        return evidence(H, la.log_likelihood, la.mean, of_weights)

    found = climbed(la.log_marginal_likelihood, len(n_weights))
    expected = climbed(of_dense, len(n_weights))
    assert_close(found, expected, rtol=1e-6, atol=1e-8)
    # They do climb.
    precisions, values = found
    assert values[-1] > values[0] + 1
    # Numbers that a user has differentiated can be set.
    la.prior_precision = precisions
    assert torch.isfinite(la(first_batch())).all()
