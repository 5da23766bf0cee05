"""Nothing but the posterior changes: not the model, not torch's state, also after an exception."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.support.models import laplace_keywords, lora_model, pairs, plain_model, ragged_batches
from tests.support.posteriors import STRUCTURES, make
from tests.support.snapshots import Snapshot, half_trained


@pytest.mark.parametrize("structure", [*STRUCTURES, "expand"])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_construction_and_fit_leave_everything(kind, structure):
    model = half_trained(lora_model(kind))
    settings = laplace_keywords(kind)
    if structure not in STRUCTURES:
        settings |= {"backend_kwargs": {"kfac_approx": structure}}
        structure = "lowrank_kron"
    before = Snapshot(model)
    la = make(model, structure, **settings)
    before.assert_equal(model)
    batches = ragged_batches()
    for override in (True, False):
        la.fit(batches, override=override)
        before.assert_equal(model)
    assert_close(batches, ragged_batches(), rtol=0, atol=0)


GRID = {"method": "gridsearch", "grid_size": 3}
NN = {"pred_type": "nn", "n_samples": 2}
USES: dict[str, Callable[[Any, list], object]] = {
    "glm": lambda la, batches: la(batches[0]),
    "glm mean field": lambda la, batches: la(batches[0], link_approx="mean_field"),
    "evidence": lambda la, batches: la.log_marginal_likelihood(),
    "state": lambda la, batches: la.load_state_dict(la.state_dict()),
    "agreement": lambda la, batches: la.optimize_prior_precision(
        method="agreement", train_loader=batches
    ),
    "marglik": lambda la, batches: la.optimize_prior_precision(n_steps=3),
    "gridsearch": lambda la, batches: la.optimize_prior_precision(val_loader=batches, **GRID),
}
SAMPLING_USES: dict[str, Callable[[Any, list], object]] = {
    "glm mc": lambda la, batches: la(batches[0], link_approx="mc", n_samples=3),
    "nn": lambda la, batches: la(batches[0], link_approx="mc", **NN),
    "weights": lambda la, batches: la.sample(3),
    "functional samples": lambda la, batches: la.functional_samples(batches[0], **NN),
    "predictive samples": lambda la, batches: la.predictive_samples(batches[0], n_samples=2),
    "gridsearch by nn": lambda la, batches: la.optimize_prior_precision(
        link_approx="mc", val_loader=batches, **NN, **GRID
    ),
    "with a generator": lambda la, batches: [
        la(batches[0], pred_type=kind, link_approx="mc", generator=torch.Generator())
        for kind in ("glm", "nn")
    ],
}


@pytest.mark.parametrize("use", [*USES, *SAMPLING_USES])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_uses_leave_everything_but_the_random_state_of_draws(structure, use):
    model = half_trained(lora_model("bert"))
    la = make(model, structure)
    batches = ragged_batches()
    la.fit(batches)
    before = Snapshot(model)
    (USES | SAMPLING_USES)[use](la, batches)
    before.assert_equal(model, random_state=use in USES or use == "with a generator")


@pytest.mark.parametrize(
    "use",
    [
        lambda la, X: la(X),
        lambda la, X: la(X, pred_type="nn", link_approx="mc", n_samples=2),
        lambda la, X: la.functional_samples(X, pred_type="nn", n_samples=2),
        lambda la, X: la.optimize_prior_precision(
            method="gridsearch", val_loader=[(X, torch.zeros(4).long())], grid_size=2
        ),
    ],
    ids=["glm", "nn", "functional samples", "gridsearch"],
)
@pytest.mark.parametrize("structure", ["lowrank_kron", "kron"])
def test_a_failing_prediction_leaves_everything(structure, use):
    model = half_trained(plain_model(lora_dropout=0.5))
    la = make(model, structure)
    la.fit(pairs(3))
    before = Snapshot(model)
    X = pairs(3)[0][0]
    expected = la(pairs(3)[0][0])
    with pytest.raises(RuntimeError):  # torch's, for matrices that do not fit
        use(la, X[:, :4])
    before.assert_equal(model, random_state=False)  # weights had been drawn
    la.prior_precision = 1.0
    assert torch.equal(la(X), expected)


def test_a_failing_construction_leaves_everything():
    model = half_trained(lora_model("bert"))
    before = Snapshot(model)
    with pytest.raises(ValueError, match="No LoRA layer matches"):
        make(model, target_modules=["nowhere"])
    with pytest.raises(ValueError, match="rank"):
        make(model, backend_kwargs={"rank": -1}).fit(ragged_batches())
    before.assert_equal(model)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("kind", "structure"), [*(("texts", s) for s in STRUCTURES), ("numbers", "lowrank_kron")]
)
def test_construction_fit_predictions_and_tuning_are_the_same_without_gradients(
    kind, structure, mode
):
    build, data = {
        "texts": (lambda: lora_model("bert"), ragged_batches),
        "numbers": (lambda: plain_model(lora_dropout=0.5), lambda: pairs(3)),
    }[kind]
    inputs = {"texts": lambda batch: batch, "numbers": lambda batch: batch[0]}[kind]
    expected = make(build(), structure)
    expected.fit(data())
    model = half_trained(build())
    before = Snapshot(model)
    with mode():
        la = make(model, structure)
        la.fit(data())  # tensors made here are inference tensors in inference mode
        X = inputs(data()[0])
        prediction = la(X)
        la(X, pred_type="nn", link_approx="mc", n_samples=2)
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
        assert not torch.is_grad_enabled()
    before.assert_equal(model, random_state=False)
    assert_close(prediction, expected(inputs(data()[0])), rtol=1e-10, atol=1e-12)
    evidences = [posterior.log_marginal_likelihood() for posterior in (la, expected)]
    assert_close(*evidences, rtol=1e-10, atol=0)
    log_precision = torch.zeros((), dtype=torch.float64, requires_grad=True)
    la.log_marginal_likelihood(log_precision.exp()).backward()
    assert torch.isfinite(log_precision.grad)
    la.optimize_prior_precision(method="marglik", n_steps=3)
    assert torch.isfinite(la.prior_precision).all()
