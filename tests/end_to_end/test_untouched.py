"""Nothing but the posterior changes, also after an exception."""

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
        ("bert", {"structure": "full"}),
        ("gpt2", {"structure": "kron"}),
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


def functions(la, X, loader):
    la.functional_samples(X, pred_type="nn", n_samples=2)


# Each is given a posterior, inputs and a loader, whether it needs them or not.
USES = {
    "predict": lambda la, X, loader: la(X),
    "evidence": lambda la, X, loader: la.optimize_prior_precision(n_steps=3),
    "state": lambda la, X, loader: la.load_state_dict(la.state_dict()),
    "agreement": lambda la, X, loader: la.optimize_prior_precision(
        method="agreement", train_loader=loader
    ),
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
        # The host's structures have no statistics.
        if name != "agreement" or structure == "lowrank_kron":
            before = Snapshot(model)
            use(la, batches[0], batches)
            before.assert_equal(model, random_state=name in USES)


@pytest.mark.parametrize("use", [by_networks, functions, search])
def test_a_failing_prediction_leaves_everything(use):
    model = half_trained(plain_model(lora_dropout=0.5))
    la = make(model)
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


# An inference tensor of numbers can't be kept for a backward pass, one of tokens need
# not be.
@pytest.mark.parametrize(
    ("structure", "reads_tokens", "mode"),
    [
        ("lowrank_kron", True, torch.no_grad),
        ("lowrank_kron", True, torch.inference_mode),
        ("lowrank_kron", False, torch.inference_mode),
        ("kron", True, torch.inference_mode),
        ("full", True, torch.inference_mode),
    ],
)
def test_all_is_the_same_without_gradients(structure, reads_tokens, mode):
    def build():
        return lora_model("bert") if reads_tokens else plain_model(lora_dropout=0.5)

    def data():
        return ragged_batches() if reads_tokens else pairs(3)

    def first(batches):
        return batches[0] if reads_tokens else batches[0][0]

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
        found = la(first(data()))
        by_networks(la, first(data()), None)
        # The user's mode is as it was.
        assert torch.is_inference_mode_enabled() == was_inference
        assert not torch.is_grad_enabled()
    before.assert_equal(model, random_state=False)
    assert_close(found, with_gradients(first(data())), rtol=1e-10, atol=1e-12)
    expected = with_gradients.log_marginal_likelihood()
    assert_close(la.log_marginal_likelihood(), expected, rtol=1e-10, atol=0)

    # Once gradients are back, the prior can be learnt, or changed in place.
    la.prior_precision.mul_(1)
    log_precision = torch.zeros((), dtype=torch.float64, requires_grad=True)
    la.log_marginal_likelihood(log_precision.exp()).backward()
    assert log_precision.grad.isfinite()
    la.optimize_prior_precision(method="marglik", n_steps=3)
    assert la.prior_precision.isfinite().all()
