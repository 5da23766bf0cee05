"""Nothing but the posterior changes, also after an exception."""

from functools import partial

import pytest
import torch
from torch.testing import assert_close

from tests.support.models import pairs, plain_model, ragged_batches
from tests.support.posteriors import generator, make
from tests.support.snapshots import Snapshot, half_trained

BY_NETWORKS = {"pred_type": "nn", "link_approx": "mc", "n_samples": 2}


def test_what_draws_nothing_or_by_a_generator_leaves_the_random_state(la):
    batches = ragged_batches()
    before = torch.get_rng_state()
    la(batches[0])
    la.predict_proba(batches[0], link_approx="mc")
    la(batches[0], **BY_NETWORKS, generator=generator())
    la.optimize_prior_precision(method="gridsearch", val_loader=batches, grid_size=3)
    la.optimize_prior_precision(method="agreement", train_loader=batches)
    la.optimize_prior_precision(n_steps=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_failing_prediction_leaves_everything():
    model = half_trained(plain_model(lora_dropout=0.5))
    la = make(model)
    la.fit(pairs(3))
    ((X, _),) = pairs()
    expected = la(X)
    before = Snapshot(model)
    # torch's error, for matrices that do not fit.
    with pytest.raises(RuntimeError):
        la(X[:, :4], **BY_NETWORKS)
    # Weights had been drawn by then.
    before.assert_equal(model, random_state=False)
    assert torch.equal(la(X), expected)


# --- without gradients ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("structure", "mode"),
    [
        ("lowrank_kron", torch.no_grad),
        ("lowrank_kron", torch.inference_mode),
        ("kron", torch.inference_mode),
        ("full", torch.inference_mode),
    ],
)
def test_all_is_the_same_without_gradients(structure, mode):
    build = partial(plain_model, lora_dropout=0.5)
    batches = pairs(3)
    ((X, _),) = pairs()
    with_gradients = make(build(), structure)
    with_gradients.fit(batches)
    model = half_trained(build())
    before = Snapshot(model)
    with mode():
        was_inference = torch.is_inference_mode_enabled()
        la = make(model, structure)
        # Tensors made here are inference tensors in inference mode, which can't be kept
        # for a backward pass. Curvlinops takes them as labels alone.
        given = batches if structure == "kron" else pairs(3)
        la.fit([(X, y.clone()) for X, y in given])
        la.prior_precision = torch.ones(1, dtype=torch.float64)
        ((inputs, _),) = pairs()
        found = la(inputs)
        la(inputs, **BY_NETWORKS)
        evidence = la.log_marginal_likelihood()
        # The user's mode is as it was.
        assert torch.is_inference_mode_enabled() == was_inference
        assert not torch.is_grad_enabled()
    before.assert_equal(model, random_state=False)
    assert_close(found, with_gradients(X), rtol=1e-10, atol=1e-12)
    expected = with_gradients.log_marginal_likelihood()
    assert_close(evidence, expected, rtol=1e-10, atol=0)

    # Once gradients are back, the prior can be learnt, or changed in place.
    la.prior_precision.mul_(1)
    log_precision = torch.zeros((), dtype=torch.float64, requires_grad=True)
    la.log_marginal_likelihood(log_precision.exp()).backward()
    assert log_precision.grad.isfinite()
