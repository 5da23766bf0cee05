"""Searches for the most of an evidence."""

import warnings

import pytest
import torch

from laplace_lora_ext.tuning.evidence_search import maximize_linearized_evidence
from tests.support.models import ragged_batches
from tests.support.posteriors import fitted, linearized


def test_a_mode_that_is_inexact_is_reported(monkeypatch):
    monkeypatch.setattr("laplace_lora_ext.linearized.model._MOST_ITERATIONS", 1)
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


def test_a_cap_that_came_too_early_is_said():
    la = fitted()
    with pytest.warns(UserWarning, match="has not converged in 15 steps"):
        la.optimize_prior_precision(n_steps=15)


def test_prior_precisions_stay_within_the_representable_range():
    la = fitted()
    la.prior_mean = la.mean
    with pytest.warns(UserWarning, match="no maximum"):
        la.optimize_prior_precision(n_steps=2000, tolerance=0, lr=1.0)
    assert torch.isfinite(la.prior_precision).all()
    assert la.prior_precision.item() <= torch.finfo(torch.float32).max * 1.01
