"""The evidence at the trained weights."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.support.dense import evidence
from tests.support.models import first_batch
from tests.support.posteriors import (
    STRUCTURES,
    fitted,
    plain_regression,
    sizes,
)


def differentiable(value: Tensor) -> Tensor:
    """Copy a number, such that an evidence can be differentiated in it."""
    copy = value.detach().clone()
    return copy.requires_grad_()


def steepness(
    evidence: Tensor,
    value: Tensor,
) -> float:
    """Find an evidence's steepest slope in logarithms, in nats a factor of e."""
    (gradient,) = torch.autograd.grad(
        evidence,
        value,
        # Others of its arguments may be asked about too.
        retain_graph=True,
    )
    slopes = (gradient * value).abs()
    return slopes.max().item()


# --- where the search ends ------------------------------------------------------------


@pytest.mark.parametrize("structure", ["lowrank_kron", "kron"])
def test_the_noise_of_a_regression_is_tuned_with_the_prior(structure):
    la, _ = plain_regression(structure=structure)
    before = la.log_marginal_likelihood().item()
    la.optimize_prior_precision(
        optimize_sigma_noise=True,
        n_steps=3000,
    )
    prior = differentiable(la.prior_precision)
    noise = differentiable(la.sigma_noise)
    best = la.log_marginal_likelihood(prior, noise)
    assert best.item() > before
    assert steepness(best, prior) < 0.05
    assert steepness(best, noise) < 0.05
    # The host's product of factors with a number has no derivative in it.
    for factor in (0.97, 1.03):
        beside = la.log_marginal_likelihood(prior, noise * factor)
        assert beside < best


@dataclass(frozen=True)
class Search:
    """A posterior whose evidence a search has maximised, and what it went through."""

    la: Any
    history: Any
    prior_precision: Tensor
    highest: float  # the evidence at the prior precision that was chosen


# Of the module, for it takes thousands of steps.
@pytest.fixture(
    scope="module",
    params=[
        ("scalar", True, torch.float64),
        ("scalar", False, torch.float32),
        ("layerwise", True, torch.float32),
    ],
    ids=str,
)
def search(request: pytest.FixtureRequest) -> Search:
    """A search for the highest evidence, with steps to spare."""
    prior, tail, dtype = request.param
    la = fitted(dtype=dtype, tail=tail)
    with warnings.catch_warnings():
        # That it has not converged would be said.
        warnings.simplefilter("error")
        history = la.optimize_prior_precision(
            prior_structure=prior,
            n_steps=3000,
        )
    highest = la.log_marginal_likelihood()
    return Search(
        la=la,
        history=history,
        prior_precision=la.prior_precision.clone(),
        highest=highest.item(),
    )


def test_a_search_stops_where_nothing_changes_any_more(search):
    objective = search.history.objective
    assert 11 < len(objective) < 3000
    last = objective[-1].item()
    assert last == pytest.approx(search.highest, abs=1e-6)
    # Steps before the last may have come a little nearer.
    best = objective.max().item()
    assert best <= search.highest + 1e-2


def test_the_last_prior_is_chosen(search):
    chosen = search.prior_precision
    last = search.history.prior_precision[-1]
    assert_close(last.to(chosen), chosen)


def test_the_evidence_has_no_slope_where_the_search_ends(search):
    precision = differentiable(search.prior_precision)
    final = search.la.log_marginal_likelihood(precision)
    assert steepness(final, precision) < 0.05


def test_no_point_of_a_grid_has_more_evidence(search):
    # A layerwise prior may be any scalar.
    for point in torch.logspace(-4, 4, 81):
        evidence = search.la.log_marginal_likelihood(point)
        assert evidence.item() <= search.highest + 1e-3


def test_an_evidence_that_still_changes_is_said():
    la = fitted()
    message = "has not converged in 3 steps"
    with pytest.warns(UserWarning, match=message):
        la.optimize_prior_precision(n_steps=3)


# --- against dense algebra ------------------------------------------------------------


def n_weights_of(
    prior: str,
    la: Any,
) -> Tensor:
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
    n_precisions = len(n_weights)
    precision = torch.linspace(0.5, 3.0, n_precisions).double()
    la.prior_precision = precision
    la.prior_mean = 0.1
    of_weights = precision.repeat_interleave(n_weights)
    log_det = of_weights.log().sum()
    assert_close(la.log_det_prior_precision, log_det)
    distances = la.mean - 0.1
    scatter = of_weights @ distances.square()
    assert_close(la.scatter, scatter)


def dense_curvature(
    la: Any,
    structure: str,
) -> Tensor:
    if structure == "diag":
        return la.H.diag()
    if structure == "full":
        return la.H
    return la.H.to_matrix()


@dataclass(frozen=True)
class Climb:
    """Where fifty steps end, and the objective before each."""

    precisions: Tensor
    values: Tensor


def climbed(
    objective: Callable[[Tensor], Tensor],
    n_precisions: int,
) -> Climb:
    """Take fifty steps of Adam from precisions of 1, as a user may."""
    logarithms = torch.zeros(
        n_precisions,
        dtype=torch.float64,
        requires_grad=True,
    )
    optimizer = torch.optim.Adam(
        [logarithms],
        lr=0.1,
        maximize=True,
    )
    values = []
    for _ in range(50):
        optimizer.zero_grad()
        value = objective(logarithms.exp())
        value.backward()
        optimizer.step()
        values.append(value.detach())
    precisions = logarithms.detach().exp()
    return Climb(
        precisions=precisions,
        values=torch.stack(values),
    )


OF_BLOCKS = [(structure, "layerwise") for structure in STRUCTURES]


@pytest.mark.parametrize(
    ("structure", "prior"),
    [*OF_BLOCKS, ("diag", "diagonal")],
)
def test_fifty_steps_of_a_users_own_on_the_evidence_are_those_on_a_dense_one(
    structure,
    prior,
):
    la = fitted(structure=structure)
    n_weights = n_weights_of(prior, la)
    H = dense_curvature(la, structure)

    def of_dense(precision: Tensor) -> Tensor:
        of_weights = precision.repeat_interleave(n_weights)
        return evidence(H, la.log_likelihood, la.mean, of_weights)

    n_precisions = len(n_weights)
    found = climbed(la.log_marginal_likelihood, n_precisions)
    expected = climbed(of_dense, n_precisions)
    assert_close(found.precisions, expected.precisions, rtol=1e-6, atol=1e-8)
    assert_close(found.values, expected.values, rtol=1e-6, atol=1e-8)
    # They do climb.
    first = found.values[0]
    last = found.values[-1]
    assert last > first + 1


def test_numbers_that_a_user_has_differentiated_can_be_set():
    la = fitted()
    found = climbed(la.log_marginal_likelihood, len(la.blocks))
    la.prior_precision = found.precisions
    p = la(first_batch())
    assert torch.isfinite(p).all()
