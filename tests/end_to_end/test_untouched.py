"""Nothing but the posterior changes, also after an exception."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.support.models import (
    laplace_keywords,
    lora_model,
    pairs,
    plain_model,
    ragged_batches,
)
from tests.support.posteriors import OURS_AND_A_HOSTS, generator, make
from tests.support.snapshots import Snapshot, half_trained

# --- construction, fit and uses -------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("bert", {"structure": "lowrank_kron"}),
        ("gpt2", {"structure": "kron"}),
        ("bert", {"structure": "full"}),
        ("gpt2", {"backend_kwargs": {"kfac_approx": "expand"}}),
    ],
)
def test_construction_and_fit_leave_everything(kind, settings):
    model = half_trained(lora_model(kind))
    batches = ragged_batches()
    before = Snapshot(model)
    la = make(model, **settings, **laplace_keywords(kind))
    before.assert_equal(model)
    la.fit(batches)
    la.fit(batches, override=False)
    before.assert_equal(model)
    # The texts are the user's as well.
    assert_close(batches, ragged_batches(), rtol=0, atol=0)
    for refused in ({"target_modules": ["nowhere"]}, {"backend_kwargs": {"rank": -1}}):
        with pytest.raises(ValueError, match=r"nowhere|rank"):
            make(model, **laplace_keywords(kind), **refused).fit(batches)
        before.assert_equal(model)


def by_networks(la, X, loader):
    la(X, pred_type="nn", link_approx="mc", n_samples=2)


def search(la, X, loader):
    la.optimize_prior_precision(method="gridsearch", val_loader=loader, grid_size=3)


def agree(la, X, loader):
    # The host's structures have no statistics.
    if la._key[1] == "lowrank_kron":
        la.optimize_prior_precision(method="agreement", train_loader=loader)


def functions(la, X, loader):
    la.functional_samples(X, pred_type="nn", n_samples=2)


# Each is given a posterior, inputs and a loader, whether it needs them or not.
USES = {
    "predict": lambda la, X, loader: la(X),
    "mean field": lambda la, X, loader: la(X, link_approx="mean_field"),
    "evidence": lambda la, X, loader: la.optimize_prior_precision(n_steps=3),
    "state": lambda la, X, loader: la.load_state_dict(la.state_dict()),
    "agreement": agree,
    "gridsearch": search,
    "generator": lambda la, X, loader: la(
        X, pred_type="nn", link_approx="mc", generator=generator()
    ),
}
# They move the random state.
DRAWS = {
    "glm": lambda la, X, loader: la(X, link_approx="mc", n_samples=3),
    "networks": by_networks,
    "weights": lambda la, X, loader: la.sample(3),
    "functions": functions,
    "predictions": lambda la, X, loader: la.predictive_samples(X, n_samples=2),
}


@pytest.mark.parametrize("structure", OURS_AND_A_HOSTS)
def test_uses_leave_everything(structure):
    model = half_trained(lora_model("bert"))
    la = make(model, structure)
    batches = ragged_batches()
    la.fit(batches)
    for name, use in (USES | DRAWS).items():
        before = Snapshot(model)
        use(la, batches[0], batches)
        before.assert_equal(model, random_state=name in USES)


@pytest.mark.parametrize("structure", OURS_AND_A_HOSTS)
@pytest.mark.parametrize("use", [by_networks, functions, search])
def test_a_failing_prediction_leaves_everything(structure, use):
    model = half_trained(plain_model(lora_dropout=0.5))
    la = make(model, structure)
    la.fit(pairs(3))
    ((X, y),) = pairs()
    expected = la(X)
    before = Snapshot(model)
    too_narrow = X[:, :4]
    # torch's error, for matrices that do not fit.
    with pytest.raises(RuntimeError):
        use(la, too_narrow, [(too_narrow, y)])
    # Weights had been drawn by then.
    before.assert_equal(model, random_state=False)
    assert torch.equal(la(X), expected)


# --- without gradients ----------------------------------------------------------------


def inputs_of(batches: list) -> Any:
    """Take the first batch, or its inputs alone."""
    first, *_ = batches
    return first if isinstance(first, dict) else first[0]


# An inference tensor of numbers can't be kept for a backward pass, one of tokens need
# not be.
TEXTS = (partial(lora_model, "bert"), ragged_batches)
NUMBERS = (partial(plain_model, lora_dropout=0.5), partial(pairs, 3))


@pytest.mark.parametrize(
    ("structure", "kind", "mode"),
    [
        ("lowrank_kron", TEXTS, torch.no_grad),
        ("lowrank_kron", TEXTS, torch.inference_mode),
        ("kron", TEXTS, torch.inference_mode),
        ("full", TEXTS, torch.inference_mode),
        ("lowrank_kron", NUMBERS, torch.inference_mode),
    ],
)
def test_all_is_the_same_without_gradients(structure, kind, mode):
    build, data = kind
    with_gradients = make(build(), structure)
    with_gradients.fit(data())
    model = half_trained(build())
    before = Snapshot(model)
    with mode():
        was_inference = torch.is_inference_mode_enabled()
        la = make(model, structure)
        # Tensors made here are inference tensors in inference mode.
        la.fit(data())
        la.prior_precision = torch.ones(1, dtype=torch.float64)
        found = la(inputs_of(data()))
        by_networks(la, inputs_of(data()), None)
        # The user's mode is as it was.
        assert torch.is_inference_mode_enabled() == was_inference
        assert not torch.is_grad_enabled()
    before.assert_equal(model, random_state=False)
    expected = with_gradients(inputs_of(data()))
    assert_close(found, expected, rtol=1e-10, atol=1e-12)
    expected = with_gradients.log_marginal_likelihood()
    assert_close(la.log_marginal_likelihood(), expected, rtol=1e-10, atol=0)

    # Once gradients are back, the prior can be learnt, or changed in place.
    la.prior_precision.mul_(1)
    log_precision = torch.zeros((), dtype=torch.float64, requires_grad=True)
    la.log_marginal_likelihood(log_precision.exp()).backward()
    assert log_precision.grad.isfinite()
    la.optimize_prior_precision(method="marglik", n_steps=3)
    assert la.prior_precision.isfinite().all()
