"""Variances that a posterior has learnt, against its exact ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_lora_ext.models.swapping import swapping
from laplace_lora_ext.predictive.amortization import (
    amortized_moments,
    changes_of_logits,
    noting_dtypes,
)
from laplace_lora_ext.predictive.learnt_variance import log_variances
from laplace_lora_ext.predictive.posterior import drawn_functions
from tests.support.models import lora_model, plain_model, ragged_batches, with_lora
from tests.support.posteriors import (
    count_backward_passes,
    count_forward_passes,
    fitted,
    generator,
    make,
    plain_regression,
    priors_of_blocks,
)
from tests.support.snapshots import Snapshot, half_trained
from tests.support.texts import fitted_text

LINKS = ["mean_field", "probit", "mc", "bridge"]
AMORTIZED = {"pred_type": "amortized"}


@pytest.fixture
def amortized(la):
    """A posterior of a classifier that has learnt its variances from its batches."""
    la.amortize(ragged_batches())
    return la


# --- numbers --------------------------------------------------------------------------


def test_variances_that_fit_no_covariance_give_the_nearest_one():
    la, X = plain_regression()
    # Numbers have no swapped copies.
    assert "n_examples=12" in repr(la.amortize([X]))
    # Of outputs with a variance of 1 each, no difference has more than 4.
    logs = torch.tensor([1.0, 1.0, 10.0]).double().log()
    learnt = la.learnt_variance
    la.learnt_variance = replace(
        learnt,
        weights=torch.zeros_like(learnt.weights),
        offset=logs,
        lowest=logs,
        highest=logs,
    )
    _, f_var = la(X, **AMORTIZED)
    # Of [[1, -4], [-4, 1]], without its eigenvalue of -3.
    expected = torch.tensor([[2.5, -2.5], [-2.5, 2.5]]).double()
    assert_close(f_var, expected.expand_as(f_var))
    deviations = la.predict(X, **AMORTIZED).epistemic_std
    assert_close(deviations.square(), f_var.diagonal(dim1=1, dim2=2))
    with pytest.raises(ValueError, match="no covariance between examples"):
        la(X, joint=True, **AMORTIZED)


# --- their price ----------------------------------------------------------------------


def test_a_prediction_is_one_forward_pass(amortized, batch, monkeypatch):
    la = amortized
    backward_passes = count_backward_passes(monkeypatch)
    passes = count_forward_passes(la)
    for link in LINKS:
        assert not la(batch, link_approx=link, **AMORTIZED).requires_grad
    la.predict(batch, **AMORTIZED)
    assert len(passes) == len(LINKS) + 1
    assert not backward_passes
    moments = amortized_moments(la, batch)
    for predict in (partial(la, link_approx="mc"), la.predict):
        # With the same noise each time.
        found = predict(batch, generator=generator(), **AMORTIZED)
        assert_close(found, predict(moments, generator=generator()))


# --- many outputs ---------------------------------------------------------------------


# Found are central differences: rounding and curvature leave an error. Under autocast
# 0.26 is measured, and 7.2 with the steps of float32.
@pytest.mark.parametrize(
    ("dtype", "autocast", "bound"),
    [(torch.float64, False, 1e-6), (torch.float32, True, 0.5)],
)
def test_changes_of_logits_are_those_of_the_linearised_model(
    batch, dtype, autocast, bound
):
    la = fitted(dtype=dtype)
    drawn = la.sample(4, generator())
    linearised = drawn_functions(la, drawn, "glm", batch)
    expected = linearised - la.predictive_moments(batch).f_mu
    # As a trainer of mixed precision leaves it.
    model = la.model.model
    model.forward = torch.autocast("cpu", torch.bfloat16, autocast)(model.forward)
    with noting_dtypes(la) as dtypes:
        la.model(batch)
    found = changes_of_logits(la, batch, drawn, dtypes)
    assert (found - expected).norm() < bound * expected.norm()


class Exponential(nn.Module):
    """Has logits' variances proportional to exp(2 x_0), the layer's input.

    Their logarithms are thus linear in the head's inputs, of which x_0 is one.
    """

    def __init__(self, n_outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.head = nn.Linear(9, n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        constant = self.layer(torch.ones_like(x))
        first = x[:, :1]
        z = first.exp() * constant
        features = torch.cat([x, z], dim=1)
        return self.head(features)


def inputs(n: int, seed: int, spread: float = 1.0) -> Tensor:
    """Draw numbers between minus and plus the spread."""
    uniform = torch.rand(n, 5, generator=generator(seed)).double()
    return spread * (2 * uniform - 1)


def test_many_outputs_learn_from_draws(monkeypatch):
    n_outputs = 18  # more than are learnt from exact covariances
    la = make(with_lora(Exponential(n_outputs), "layer"), prior_precision=20.0)
    la.fit([(inputs(40, seed=1), torch.arange(40) % n_outputs)])
    la.n_contrasts = n_outputs
    # Within what is learnt from, beyond which variances are cut off.
    points = inputs(20, seed=4, spread=0.9)
    exact = la(points, link_approx="mean_field")
    of_map = la.model(points).softmax(-1)
    unlabelled = [inputs(4, seed=seed) for seed in range(100)]
    backward_passes = count_backward_passes(monkeypatch)
    passes = count_forward_passes(la)
    learnt = la.amortize(unlabelled, None)
    # One at the weights and two at each of eight draws, whatever the number of classes.
    assert len(passes) == 17 * len(unlabelled)
    assert not backward_passes
    # From what the head reads, and how probable the model thinks each class.
    log_p = la.model(torch.cat(unlabelled)).log_softmax(-1)
    assert_close(learnt.mean[9:], log_p.mean(0))
    assert torch.equal(la.amortize(unlabelled, None).weights, learnt.weights)
    others = la.amortize(unlabelled, None, generator=generator(1))
    assert not torch.equal(others.weights, learnt.weights)
    la.learnt_variance = learnt
    # Right on average, though the logarithm of a mean of eight squares is not.
    f_var = torch.cat([la.predictive_moments(each).f_var for each in unlabelled])
    bias = learnt.offset - log_variances(f_var).mean(0)
    # -0.03 is measured, and -0.16 of what is left uncorrected.
    assert bias.mean().abs() < 0.07
    # The noise of the draws, without which it is 0.83, is not the features' fault.
    assert learnt.r_squared > 0.95
    found = la(points, link_approx="mean_field", **AMORTIZED)
    errors = (found - exact).abs()
    assert errors.mean() < 0.2 * (of_map - exact).abs().mean()


# --- what it learns from --------------------------------------------------------------


def test_it_learns_from_each_text_and_a_copy_by_a_generator(la):
    batches = ragged_batches()
    assert la.amortize(batches, None).n_examples == 8
    before = torch.get_rng_state()
    one = la.amortize(batches)
    assert one.n_examples == 16
    assert torch.equal(la.amortize(batches).offset, one.offset)
    assert torch.equal(torch.get_rng_state(), before)
    other = la.amortize(batches, generator=generator(1))
    assert not torch.equal(one.offset, other.offset)
    # Copies are learnt from as texts of one's own, as texts without labels are.
    swapped = swapping(la.model, "swapped", batches, generator(1))
    more = [swapped(batch) for batch in batches]
    both = la.amortize([*batches, *more], None)
    unlabelled = la.amortize(batches, more)
    # A principal component may have either sign.
    for learnt in (other, unlabelled):
        assert_close(learnt.weights.abs(), both.weights.abs())
    # What was learnt last is kept.
    assert la.learnt_variance is unlabelled


# --- what it belongs to ---------------------------------------------------------------


def test_it_belongs_to_a_fit_and_a_prior(amortized, batch):
    expected = amortized(batch, **AMORTIZED)
    hyperparameters = amortized.hyperparameters
    for name, value in [
        ("prior_precision", 2.0),
        ("prior_precision", priors_of_blocks(amortized)),
        ("temperature", 2.0),
    ]:
        setattr(amortized, name, value)
        with pytest.raises(ValueError, match="The prior has changed since"):
            amortized.predict(batch, **AMORTIZED)
        amortized.hyperparameters = hyperparameters
        amortized.temperature = 1.0
    # It serves again with its own.
    assert torch.equal(amortized(batch, **AMORTIZED), expected)
    amortized.prior_precision.mul_(2)
    with pytest.raises(ValueError, match="The prior has changed since"):
        amortized(batch, **AMORTIZED)
    amortized.fit(ragged_batches())
    with pytest.raises(ValueError, match=r"No variance is learnt .*la\.amortize"):
        amortized.predict(batch, **AMORTIZED)
    amortized.blocks[0].weight.data.mul_(2)
    for use in (
        partial(amortized, batch, **AMORTIZED),
        partial(amortized.amortize, []),
    ):
        with pytest.raises(RuntimeError, match="weights"):
            use()


# --- what is refused ------------------------------------------------------------------

WITHOUT_TEXT = {
    "input_ids": torch.ones(1, 4).long(),
    "attention_mask": torch.zeros(1, 4),
}


# What is tried with a posterior and its batches.
REFUSED = [
    (lambda la, _: la.amortize([]), "no data"),
    (
        lambda la, batches: la.amortize([batches[0], WITHOUT_TEXT], None),
        "batch 1: .*no text",
    ),
    (lambda la, batches: la.predict(batches[0], pred_type="nn"), "pred_type"),
    (lambda *_: make(plain_model()).amortize([inputs(4, seed=1)]), "fit"),
    (lambda _, batches: fitted_text().amortize(batches), "not language_modeling"),
]


def test_what_is_refused_leaves_the_model_and_what_was_learnt():
    model = half_trained(lora_model("bert"))
    la = fitted(model=model)
    batches = ragged_batches()
    learnt = la.amortize(batches)
    before = Snapshot(model)
    refusals = ValueError, AttributeError, NotImplementedError
    for use, message in REFUSED:
        with pytest.raises(refusals, match=message):
            use(la, batches)
        assert la.learnt_variance is learnt
        # Some refusals make a model of their own first, by draws.
        before.assert_equal(model, random_state=False)
