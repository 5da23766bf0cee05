"""Descents: on the evidence at the trained weights, and on validation data's loss."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import nll_loss
from torch.testing import assert_close

from laplace_lora_ext import TuningHistory, ValGD
from laplace_lora_ext.predictive.links import log_probabilities
from laplace_lora_ext.tuning import descents
from tests.support.dense import curvature_of, evidence
from tests.support.models import first_batch, ragged_batches
from tests.support.posteriors import STRUCTURES, fitted, generator, overconfident, sizes

# --- the evidence ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prior", "tail", "dtype"),
    [("scalar", True, torch.float64), ("layerwise", False, torch.float32)],
)
def test_a_search_ends_where_the_evidence_is_highest(prior, tail, dtype):
    la = fitted(dtype=dtype, tail=tail)
    with pytest.warns(UserWarning, match="not converged in 3 steps"):
        few = la.optimize_prior_precision(prior_structure=prior, n_steps=3)
    # Where the last step has led is measured and chosen.
    assert few.choice == 3
    assert few.prior_precision[:, 0].unique().numel() == 4
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
    # Of the steepest slope in logarithms, in nats a factor of e.
    (slopes,) = torch.autograd.grad(highest, chosen)
    assert (slopes * chosen).abs().max() < 0.05
    # A layerwise prior may be any scalar.
    for point in torch.logspace(-4, 4, 81):
        assert la.log_marginal_likelihood(point) <= highest + 1e-3


@pytest.mark.parametrize(
    ("structure", "prior"),
    [*((structure, "layerwise") for structure in STRUCTURES), ("diag", "diagonal")],
)
def test_the_evidence_has_the_slopes_of_a_dense_one(structure, prior):
    la = fitted(structure=structure)
    # How many weights each precision is for.
    n_weights = torch.ones(la.n_params, dtype=torch.long)
    if prior == "layerwise":
        n_weights = torch.tensor(sizes(la))
    la.prior_mean = 0.1
    H = curvature_of(la)

    def of_dense(precision: Tensor) -> Tensor:
        of_weights = precision.repeat_interleave(n_weights)
        return evidence(H, la.log_likelihood, la.mean - 0.1, of_weights)

    drawn = torch.rand(len(n_weights), generator=generator()) + 0.5
    precision = drawn.double().requires_grad_()
    found, expected = la.log_marginal_likelihood(precision), of_dense(precision)
    assert_close(found, expected)
    slopes = [torch.autograd.grad(each, precision) for each in (found, expected)]
    assert_close(*slopes)
    # Numbers that a user differentiates can be set.
    la.prior_precision = precision
    assert torch.isfinite(la(first_batch())).all()


# --- the loss of validation data ------------------------------------------------------


@pytest.fixture(scope="module")
def fitted_and_texts():
    """A posterior that is too sure, whose searches set a prior alone, and texts."""
    return overconfident()


def descended(la: Any, texts: Any, **options: Any) -> TuningHistory:
    """Descend on the loss of all texts at once, so that no noise hides anything."""
    return ValGD(val_loader=texts, batch_size=24, **options)(la)


def test_steps_become_shorter_along_half_a_cosine(fitted_and_texts):
    history = descended(*fitted_and_texts, n_steps=20, init_prior_prec=1e4)
    logs = history.prior_precision[:, 0].log()
    # So far from the best, Adam's steps have the same sign.
    expected = 0.05 * (1 + torch.cos(torch.pi * torch.arange(20) / 20)).double()
    assert_close(-logs.diff(), expected, rtol=0.1, atol=1e-3)


@pytest.mark.parametrize(
    ("link", "n_samples", "close"), [("mean_field", 1, 1e-6), ("mc", 100_000, 0.005)]
)
def test_the_history_is_the_loss_of_the_predictions(
    link, n_samples, close, monkeypatch
):
    monkeypatch.setattr(descents, "_ROWS", 5)  # of eight texts
    la = fitted(prior_precision=0.03)
    statistics = la.predictive_statistics(ragged_batches(), dtype=torch.float64)
    options = {"link_approx": link, "n_samples": n_samples}
    draws = generator(1)
    predicted = la(statistics.moments(0.03), generator=draws, **options)
    of_targets = predicted.gather(1, statistics.targets[:, None])
    expected = -of_targets.log().mean().item()
    search = ValGD(val_loader=statistics, n_steps=1, init_prior_prec=0.03, **options)
    assert search(la).objective[0].item() == pytest.approx(expected, rel=close)


def test_it_finds_the_best_scalar():
    la, validation = overconfident(dtype=torch.float32)
    statistics = la.predictive_statistics(validation)

    def measure(point: Any) -> float:
        log_p = log_probabilities(statistics.moments(point), "mean_field")
        return nll_loss(log_p, statistics.targets).item()

    best = min(measure(point) for point in torch.logspace(-3, 3, 31))
    start = 100.0
    history = descended(la, validation, init_prior_prec=start, n_steps=300)
    chosen = measure(la.prior_precision)
    assert chosen <= best + 1e-3
    # Where it started, there was something to find.
    assert measure(start) > best + 0.02
    # And it stays where it has come to.
    assert history.objective[-1].item() == pytest.approx(chosen, rel=1e-5)


def test_steps_that_are_far_too_long_leave_numbers_of_which_it_takes_the_best(
    fitted_and_texts,
):
    la, texts = fitted_and_texts
    search = ValGD(val_loader=texts, link_approx="probit", n_steps=45, lr=200.0)
    history = search(la)
    # Before the first step, every second one, and after the last.
    assert len(history.trials) == 24
    # There is no going farther.
    limits = torch.finfo(torch.float32)
    low, high = (value.item() for value in history.prior_precision.aminmax())
    assert limits.tiny * 0.999 < low
    assert high < limits.max * 1.001
    assert low < limits.tiny * 1.001 or high > limits.max * 0.999
    best = history.objective.argmin()
    assert best < len(history.trials) - 1
    assert_close(la.prior_precision, history.prior_precision[best])
