"""A posterior follows its model to other devices and into other precisions."""

from contextlib import nullcontext

import pytest
import torch

from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import STRUCTURES, fitted, generator, make
from tests.support.snapshots import tensors_of

USES = {
    "glm": lambda la, batches: la(batches[0]),
    "nn": lambda la, batches: la(
        batches[0], pred_type="nn", link_approx="mc", n_samples=2, generator=generator()
    ),
    "joint": lambda la, batches: la.predictive_moments(batches[0], joint=True)[1],
    "evidence": lambda la, batches: la.log_marginal_likelihood(),
    "evidence of a prior": lambda la, batches: la.log_marginal_likelihood(torch.tensor(3.0)),
    "density": lambda la, batches: la.log_prob(la.mean + 0.1),
    "draws": lambda la, batches: la.sample(3, generator()),
    "prior": lambda la, batches: (
        la.optimize_prior_precision(method="marglik", n_steps=5),
        la.prior_precision,
    )[1],
    "more data": lambda la, batches: (
        la.fit(batches, override=False),
        la.log_marginal_likelihood(),
    )[1],
    "state": lambda la, batches: la.state_dict()["mean"],
}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("use", USES)
def test_a_posterior_follows_its_model_into_another_precision(use, structure):
    batches = ragged_batches()
    model = lora_model("bert", torch.float32)
    la = fitted(model=model, structure=structure)
    unmoved = fitted(model=lora_model("bert", torch.float32), structure=structure)
    expected = USES[use](unmoved, batches)
    model.double()
    moved = USES[use](la, batches)
    assert moved.dtype is torch.float64
    if use in ("nn", "draws"):  # other random numbers
        assert torch.isfinite(moved).all()
    else:
        torch.testing.assert_close(moved, expected.double(), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_no_tensor_of_a_posterior_stays_behind(structure, likelihood, monkeypatch):
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # meta has none
    model = lora_model("bert", torch.float32)
    la = make(model, structure, likelihood, **{"sigma_noise": 0.5} if likelihood[0] == "r" else {})
    batches = ragged_batches()
    if likelihood == "regression":
        batches = [batch | {"labels": torch.randn(len(batch["labels"]), 3)} for batch in batches]
    la.fit(batches)
    la.optimize_prior_precision(method="marglik", n_steps=2, prior_structure="layerwise")
    la.sample(1)
    la._fitted = None  # its samples of the model's weights are compared in main memory
    model.to("meta")
    la.check_model()
    left = [t for t in tensors_of(vars(la), set()) if t.numel() and t.device.type != "meta"]
    assert not left


@pytest.mark.parametrize("structure", STRUCTURES)
def test_half_precision_rounds_the_weights_and_keeps_the_posterior(structure):
    model = lora_model("bert", torch.float32)
    la, (batch, *_) = fitted(model=model, structure=structure), ragged_batches()
    moments, mean = la.predictive_moments(batch), la.mean
    model.bfloat16()
    rounded = la.predictive_moments(batch)
    assert rounded.f_var.dtype is torch.float32
    assert la.mean is mean
    for before, after in zip(moments, rounded, strict=True):
        assert (after - before).abs().max() < 0.05 * before.abs().max()
    model.float()
    with pytest.raises(RuntimeError, match="have changed since the fit"):
        la(batch)  # their last digits are lost


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_model_may_move_between_the_posterior_and_its_fit(structure):
    model = lora_model("bert", torch.float32)
    la = make(model, structure, prior_precision=2.0, prior_mean=0.5)
    model.double()
    la.fit(ragged_batches())
    assert la.prior_precision.dtype is la.prior_mean.dtype is torch.float64
    assert la(ragged_batches()[0]).dtype is torch.float64
