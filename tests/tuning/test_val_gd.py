"""Descent on the loss of validation data."""

from typing import Any

import pytest
import torch
from torch.nn.functional import nll_loss
from torch.testing import assert_close

from laplace_lora_ext import TuningHistory
from laplace_lora_ext.predictive.links import log_probabilities
from tests.support.posteriors import fitted, generator, overconfident


def descended(la: Any, validation: Any, **options: Any) -> TuningHistory:
    """Descend on the loss of the link "probit"."""
    return la.optimize_prior_precision(
        method="val_gd", val_loader=validation, link_approx="probit", **options
    )


# --- layerwise priors -----------------------------------------------------------------


def test_val_gd_of_a_layerwise_prior_beats_the_best_scalar():
    la, validation = overconfident()
    n_blocks = len(la.blocks)
    # All texts at once, so that no noise hides the difference.
    scalar = descended(la, validation, batch_size=24)
    layerwise = descended(la, validation, batch_size=24, prior_structure="layerwise")
    assert len(la.prior_precision) == n_blocks
    assert layerwise.objective.min() < scalar.objective.min()
    # It is measured before the first step, and twenty times along the way.
    assert layerwise.prior_precision.shape == (21, n_blocks)
    start = torch.full((n_blocks,), 2.0)
    history = descended(la, validation, init_prior_prec=start, n_steps=1)
    assert_close(history.prior_precision[0].to(start), start)
    # Steps become shorter along half a cosine.
    history = descended(la, validation, n_steps=20, init_prior_prec=1e4, batch_size=24)
    logs = history.prior_precision[:, 0].log()
    # So far from the best, Adam's steps have the same sign.
    assert (logs[0] - logs[-1]).item() == pytest.approx(20 * 0.1 / 2, rel=0.1)


# --- the loss and its minimum ---------------------------------------------------------


@pytest.mark.parametrize(
    ("link", "n_samples", "close"),
    [("probit", 1, 1e-6), ("mean_field", 1, 1e-6), ("mc", 100_000, 0.005)],
)
def test_the_history_is_the_loss_of_the_predictions(validation, link, n_samples, close):
    la = fitted(prior_precision=0.03)
    statistics = la.predictive_statistics(validation, dtype=torch.float64)
    predicted = la(
        statistics.moments(0.03),
        link_approx=link,
        n_samples=n_samples,
        generator=generator(1),
    )
    of_targets = predicted.gather(1, statistics.targets[:, None])
    expected = -of_targets.log().mean().item()
    history = la.optimize_prior_precision(
        method="val_gd",
        val_loader=statistics,
        link_approx=link,
        n_samples=n_samples,
        n_steps=1,
        init_prior_prec=0.03,
    )
    found = history.objective[0].item()
    assert found == pytest.approx(expected, rel=close)


# Whole batches have no noise but that of the draws, which takes more steps.
WHOLE_BATCHES = {"n_steps": 300, "batch_size": 24}


@pytest.mark.parametrize(
    ("link", "options", "close"),
    [("mean_field", WHOLE_BATCHES, 1e-3), ("mc", {"n_steps": 1000}, 0.01)],
)
def test_val_gd_finds_the_best_scalar(link, options, close):
    la, validation = overconfident(dtype=torch.float32)
    statistics = la.predictive_statistics(validation)

    def measure(point: Any) -> float:
        moments = statistics.moments(point)
        log_p = log_probabilities(moments, link, 5_000, generator())
        return nll_loss(log_p, statistics.targets).item()

    best = min(measure(point) for point in torch.logspace(-3, 3, 31))
    start = 100.0
    history = la.optimize_prior_precision(
        method="val_gd",
        val_loader=validation,
        link_approx=link,
        init_prior_prec=start,
        generator=generator(),
        **options,
    )
    chosen = measure(la.prior_precision)
    assert chosen <= best + close
    # Where it started, there was something to find.
    assert measure(start) > best + 0.02
    # Draws of "mc" are others than those above.
    if link != "mc":
        assert history.objective.min().item() == pytest.approx(chosen, rel=1e-5)


# --- steps ----------------------------------------------------------------------------


def test_steps_that_are_far_too_long_leave_numbers_of_which_it_takes_the_best():
    la, validation = overconfident()
    history = descended(la, validation, n_steps=45, lr=200.0)
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
