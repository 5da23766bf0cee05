"""Searches for the most of an evidence."""

import warnings

import pytest
import torch

from laplace_lora_ext.linearized.model import EvidenceAtMode
from laplace_lora_ext.tuning.evidence_search import maximize_evidence, maximize_linearized_evidence
from tests.support.models import ragged_batches
from tests.support.posteriors import fitted, linearized


def test_a_mode_that_is_inexact_is_reported(monkeypatch):
    monkeypatch.setattr("laplace_lora_ext.linearized.mode._MOST_STEPS", 0)
    la = fitted()
    model = linearized(la, ragged_batches())
    with pytest.warns(UserWarning, match="mode is inexact"):
        maximize_linearized_evidence(model.evidence, torch.tensor([1e-3]), 1, 0)


def test_all_steps_are_taken_without_a_tolerance():
    la = fitted()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = la.optimize_prior_precision(n_steps=250, tolerance=0)
    assert history.step.tolist() == list(range(250))


@pytest.mark.parametrize("method", ["marglik", "linearized_marglik"])
def test_a_search_that_is_cut_short_says_so(method):
    la, options = fitted(), {"n_steps": 2, "init_prior_prec": 1e-3}
    if method == "linearized_marglik":
        options["train_loader"] = ragged_batches()
    with pytest.warns(UserWarning, match="has not converged in 2 steps") as caught:
        la.optimize_prior_precision(method=method, **options)
    assert {one.filename for one in caught} == {__file__}
    assert len(caught) == 1


def test_an_evidence_of_two_variables_is_maximised_in_both():
    """Of a parabola in the logarithms, and in a history of the first of them."""
    logarithms = [torch.tensor([0.0, 1.0]).requires_grad_(), torch.tensor(2.0).requires_grad_()]

    def evidence(first, second):
        return -((first.log() - 3) ** 2).sum() - (second.log() + 1) ** 2

    history = maximize_evidence(evidence, logarithms, 1000, 0.1, 1e-6)
    assert len(history.step) < 200
    torch.testing.assert_close(logarithms[0].detach(), torch.full((2,), 3.0), rtol=0, atol=1e-2)
    torch.testing.assert_close(logarithms[1].detach(), torch.tensor(-1.0), rtol=0, atol=1e-2)
    torch.testing.assert_close(history.prior_precision[0], torch.tensor([0.0, 1.0]).exp())
    torch.testing.assert_close(history.prior_precision[-1].log(), logarithms[0].detach())
    assert history.objective[0].item() == pytest.approx(-(9 + 4 + 9), rel=1e-5)


class Determined:
    """Of two blocks, γ directions are determined, whatever the prior precision, at ‖u‖² = s."""

    dimension = torch.tensor([4.0, 1.0]).double()
    scatter = torch.tensor([2.0, 4.0]).double()

    def __call__(self, prior_precision):
        penalty = self.dimension * prior_precision.log() - prior_precision * self.scatter
        return EvidenceAtMode(penalty.sum().item() / 2, self.dimension, self.scatter, 0.0)


def test_a_step_of_the_linearised_evidence_divides_dimensions_by_distances():
    start, options = torch.ones(1).double(), {"n_steps": 20, "tolerance": 1e-9}
    scalar = maximize_linearized_evidence(Determined(), start, **options)
    assert scalar.prior_precision.flatten().tolist() == pytest.approx([1, 5 / 6, 5 / 6])
    several = maximize_linearized_evidence(Determined(), start.expand(2), **options)
    assert several.prior_precision.tolist() == [[1, 1], [2, 0.25], [2, 0.25]]
    # With pooling it starts where the scalar has ended, as if κ directions more were determined.
    pooled = maximize_linearized_evidence(Determined(), start.expand(2), pooling=3.0, **options)
    expected = [(4 + 3) / (2 + 3 * 6 / 5), (1 + 3) / (4 + 3 * 6 / 5)]
    assert pooled.prior_precision[0].tolist() == pytest.approx([5 / 6] * 2)
    assert pooled.prior_precision[-1].tolist() == pytest.approx(expected)
    ratio = pooled.prior_precision[-1] * 6 / 5
    hyperprior = 3 / 2 * (ratio.log() - ratio + 1).sum().item()
    evidence = Determined()(pooled.prior_precision[-1]).log_marginal_likelihood
    assert pooled.objective[-1].item() == pytest.approx(evidence + hyperprior)
    assert (pooled.objective[-1] >= pooled.objective).all()


class Coupled:
    """A concave parabola in the logarithms, whose steps go a part of the way and overlap."""

    top = torch.tensor([1.0, -2.0, 0.5]).double()
    rate = torch.tensor([[0.3, 0.1, 0.0], [0.1, 0.05, 0.02], [0.0, 0.02, 0.2]]).double()

    def __init__(self):
        self.n_calls = 0

    def __call__(self, prior_precision):
        self.n_calls += 1
        away = prior_precision.log() - self.top
        scatter = torch.ones(3).double()
        dimension = (prior_precision.log() - self.rate @ away).exp()  # so that the step is -rate
        return EvidenceAtMode(-(away @ self.rate @ away).item(), dimension, scatter, 0.0)


def test_steps_are_combined_to_reach_the_maximum_sooner():
    evidence, start = Coupled(), torch.ones(3).double()
    history = maximize_linearized_evidence(evidence, start, 1000, 1e-12)
    torch.testing.assert_close(history.prior_precision[-1].log(), evidence.top, rtol=0, atol=1e-5)
    assert evidence.n_calls < 15  # of 400 steps of the slowest direction's rate
    assert (history.objective.diff() > -1e-9).all()


def test_pooling_starts_from_the_geometric_mean():
    start = torch.tensor([1e-2, 1e4]).double()
    seen = []

    def evidence(prior_precision):
        seen.append(prior_precision)
        return Determined()(prior_precision)

    maximize_linearized_evidence(evidence, start, 5, 1e-9, pooling=1.0)
    torch.testing.assert_close(seen[0], torch.tensor([10.0]).double())


def test_prior_precisions_stay_within_the_representable_range():
    la = fitted()
    la.prior_mean = la.mean
    with pytest.warns(UserWarning, match="no maximum"):
        la.optimize_prior_precision(n_steps=2000, tolerance=0, lr=1.0)
    assert torch.isfinite(la.prior_precision).all()
    assert la.prior_precision.item() <= torch.finfo(torch.float32).max * 1.01
