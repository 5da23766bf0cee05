"""The evidence at the trained weights."""

import warnings

import pytest
import torch

from tests.support.dense import evidence
from tests.support.models import ragged_batches
from tests.support.posteriors import (
    STRUCTURES,
    fitted,
    plain_regression,
    sizes,
)


def test_the_noise_of_a_regression_is_tuned_with_the_prior():
    la, _ = plain_regression()
    before = la.log_marginal_likelihood().item()
    la.optimize_prior_precision(optimize_sigma_noise=True, n_steps=3000)
    prior, sigma = (
        torch.as_tensor(value).clone().requires_grad_()
        for value in (la.prior_precision, la.sigma_noise)
    )
    evidence = la.log_marginal_likelihood(prior, sigma)
    evidence.backward()
    assert evidence.item() > before
    assert abs(prior.grad * prior).item() < 0.05
    assert abs(sigma.grad * sigma).item() < 0.05


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
    precision = torch.as_tensor(la.prior_precision).clone().requires_grad_()
    la.log_marginal_likelihood(precision).backward()
    assert (precision.grad * precision).abs().max() < 0.05  # nats in a factor of e
    la.prior_precision = precision.detach()
    final = la.log_marginal_likelihood().item()
    assert history.objective[-1].item() == pytest.approx(final, abs=1e-6)
    assert history.objective.max().item() <= final + 1e-2
    torch.testing.assert_close(history.prior_precision[-1].to(dtype), la.prior_precision)
    if prior == "scalar":
        grid = torch.logspace(-4, 4, 81)
        assert max(la.log_marginal_likelihood(point).item() for point in grid) <= final + 1e-3


def test_an_evidence_that_still_changes_is_said():
    with pytest.warns(UserWarning, match="has not converged in 3 steps"):
        fitted().optimize_prior_precision(n_steps=3)


@pytest.mark.parametrize("prior", ["scalar", "layerwise", "diagonal"])
def test_a_prior_is_the_gaussian_with_these_precisions(prior):
    la = fitted(structure="diag")  # it takes any prior
    blocks = torch.tensor(sizes(la))
    number = {
        "scalar": 1,
        "layerwise": len(blocks),
        "diagonal": la.n_params,
    }[prior]
    precision = torch.linspace(0.5, 3.0, number, dtype=torch.float64)
    repeats = {
        "scalar": la.n_params,
        "layerwise": blocks,
        "diagonal": 1,
    }[prior]
    la.prior_precision = precision
    la.prior_mean = 0.1
    of_weights = precision.repeat_interleave(torch.as_tensor(repeats))
    torch.testing.assert_close(la.log_det_prior_precision, of_weights.log().sum())
    torch.testing.assert_close(la.scatter, of_weights @ (la.mean - 0.1).square())


@pytest.mark.parametrize(
    ("structure", "prior"),
    [
        *((structure, "layerwise") for structure in STRUCTURES),
        ("diag", "diagonal"),
    ],
)
def test_fifty_steps_of_a_users_own_on_the_evidence_are_those_on_a_dense_one(structure, prior):
    la = fitted(structure=structure)
    blocks = torch.tensor(sizes(la))
    number = len(blocks) if prior == "layerwise" else la.n_params
    repeats = blocks if prior == "layerwise" else torch.ones(number, dtype=torch.long)
    H = la.H.diag() if structure == "diag" else la.H if structure == "full" else la.H.to_matrix()

    def of_dense(precision):
        return evidence(
            H,
            la.log_likelihood,
            la.mean,
            precision.repeat_interleave(repeats),
        )

    chosen = []
    found = []
    for objective in (la.log_marginal_likelihood, of_dense):
        logarithm = torch.zeros(number, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([logarithm], lr=0.1)
        values = []
        for _ in range(50):
            optimizer.zero_grad()
            value = objective(logarithm.exp())
            (-value).backward()
            optimizer.step()
            values.append(value.detach())
        chosen.append(logarithm.detach())
        found.append(torch.stack(values))
    for pair in (chosen, found):
        torch.testing.assert_close(*pair, rtol=1e-6, atol=1e-8)
    assert found[0][-1] > found[0][0] + 1
    la.prior_precision = chosen[0].exp()
    assert torch.isfinite(la(ragged_batches()[0])).all()
