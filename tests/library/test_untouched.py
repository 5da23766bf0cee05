"""Nothing but the posterior changes: not the model, not torch's state, also after an exception."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.models import laplace_keywords, lora_model, pairs, plain_model, ragged_batches
from tests.support.posteriors import STRUCTURES, make
from tests.support.snapshots import Snapshot, half_trained


@pytest.fixture(params=["bert", "gpt2"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("structure", STRUCTURES)
def test_construction_leaves_everything(kind, structure):
    model = half_trained(lora_model(kind))
    before = Snapshot(model)
    make(model, structure, **laplace_keywords(kind))
    before.assert_equal(model)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_fit_leaves_everything(kind, structure):
    model = half_trained(lora_model(kind))
    la = make(model, structure, **laplace_keywords(kind))
    before = Snapshot(model)
    la.fit(ragged_batches())
    before.assert_equal(model)
    la.fit(ragged_batches(), override=False)
    before.assert_equal(model)


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
def test_fit_with_every_approximation_leaves_everything(kind, kfac_approx):
    model = half_trained(lora_model(kind))
    settings = {"kfac_approx": kfac_approx}
    la = make(model, backend_kwargs=settings, **laplace_keywords(kind))
    before = Snapshot(model)
    la.fit(ragged_batches())
    before.assert_equal(model)


USES: dict[str, Callable[[Any, list], object]] = {
    "glm probit": lambda la, batches: la(batches[0]),
    "glm mean field": lambda la, batches: la(batches[0], link_approx="mean_field"),
    "glm bridge": lambda la, batches: la(batches[0], link_approx="bridge"),
    "evidence": lambda la, batches: la.log_marginal_likelihood(),
    "state": lambda la, batches: la.load_state_dict(la.state_dict()),
    "agreement": lambda la, batches: la.optimize_prior_precision(
        method="agreement", train_loader=batches
    ),
    "marglik": lambda la, batches: la.optimize_prior_precision(
        method="marglik", prior_structure="layerwise", n_steps=3
    ),
    "gridsearch": lambda la, batches: la.optimize_prior_precision(
        method="gridsearch",
        pred_type="glm",
        link_approx="probit",
        val_loader=batches,
        grid_size=3,
    ),
}


SAMPLING_USES: dict[str, Callable[[Any, list], object]] = {
    "glm mc": lambda la, batches: la(batches[0], link_approx="mc", n_samples=3),
    "nn": lambda la, batches: la(batches[0], pred_type="nn", link_approx="mc", n_samples=3),
    "weights": lambda la, batches: la.sample(3),
    "functional samples": lambda la, batches: la.functional_samples(
        batches[0], pred_type="nn", n_samples=2
    ),
    "predictive samples": lambda la, batches: la.predictive_samples(batches[0], n_samples=2),
    "gridsearch by nn": lambda la, batches: la.optimize_prior_precision(
        method="gridsearch",
        pred_type="nn",
        link_approx="mc",
        val_loader=batches,
        n_samples=2,
        grid_size=3,
    ),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_what_does_not_sample_leaves_everything(structure, use):
    model = half_trained(lora_model("bert"))
    la, batches = make(model, structure), ragged_batches()
    la.fit(batches)
    before = Snapshot(model)
    USES[use](la, batches)
    before.assert_equal(model)


@pytest.mark.parametrize("use", SAMPLING_USES)
@pytest.mark.parametrize("structure", ["lowrank_kron", "diag"])
def test_what_samples_leaves_everything_but_the_random_state(structure, use):
    model = half_trained(lora_model("bert"))
    la, batches = make(model, structure), ragged_batches()
    la.fit(batches)
    before = Snapshot(model)
    SAMPLING_USES[use](la, batches)
    before.assert_equal(model, random_state=False)


@pytest.mark.parametrize("use", ["glm mc", "nn"])
def test_a_generator_leaves_the_random_state(use):
    model = half_trained(lora_model("bert"))
    la, batches = make(model), ragged_batches()
    la.fit(batches)
    before = Snapshot(model)
    pred_type = use.split()[0]
    generator = torch.Generator().manual_seed(0)
    la(batches[0], pred_type=pred_type, link_approx="mc", n_samples=3, generator=generator)
    before.assert_equal(model)


def test_the_weights_of_the_posterior_are_a_copy():
    model = lora_model("bert")
    la = make(model)
    la.fit(ragged_batches())
    mean = la.mean.clone()
    with torch.no_grad():
        la.blocks[0].weight.add_(1)
    assert torch.equal(la.mean, mean)


def test_dropout_is_off_in_fit_and_predictions():
    batches = pairs(3)
    evidences, predictions = [], []
    for train in (True, False):
        model = plain_model(lora_dropout=0.5).train(train)
        la = make(model)
        la.fit(batches)
        evidences.append(la.log_marginal_likelihood())
        predictions.append(la(batches[0][0]))
    assert torch.equal(*evidences)
    assert torch.equal(*predictions)


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
    X, expected = pairs(3)[0][0], la(pairs(3)[0][0])
    with pytest.raises(RuntimeError):  # torch's, for matrices that do not fit
        use(la, X[:, :4])
    before.assert_equal(model, random_state=False)  # weights had been drawn
    la.prior_precision = 1.0
    assert torch.equal(la(X), expected)


def test_a_failing_gridsearch_leaves_the_prior_precision():
    la = make(plain_model(lora_dropout=0.5))
    la.fit(pairs(3))
    la.prior_precision = 3.0
    (X, y), *_ = pairs(3)
    with pytest.raises(RuntimeError):
        la.optimize_prior_precision(method="gridsearch", val_loader=[(X, y), (X[:, :4], y)])
    assert la.prior_precision.tolist() == [3.0]


def test_a_failing_construction_leaves_everything():
    model = half_trained(lora_model("bert"))
    before = Snapshot(model)
    with pytest.raises(ValueError, match="No LoRA layer matches"):
        make(model, target_modules=["nowhere"])
    with pytest.raises(ValueError, match="rank"):
        make(model, backend_kwargs={"rank": -1}).fit(ragged_batches())
    before.assert_equal(model)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_construction_fit_and_predictions_are_the_same_without_gradients(structure, mode):
    batches = ragged_batches()
    expected = make(lora_model("bert"), structure)
    expected.fit(batches)
    model = half_trained(lora_model("bert"))
    before = Snapshot(model)
    with mode():
        la = make(model, structure)
        la.fit(ragged_batches())  # tensors made here are inference tensors in inference mode
        prediction = la(ragged_batches()[0])
        la(batches[0], pred_type="nn", link_approx="mc", n_samples=2)
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
        assert not torch.is_grad_enabled()
    before.assert_equal(model, random_state=False)
    torch.testing.assert_close(prediction, expected(batches[0]), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        la.log_marginal_likelihood(), expected.log_marginal_likelihood(), rtol=1e-10, atol=0
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_posterior_fitted_without_gradients_can_be_tuned(structure, mode):
    la = make(lora_model("bert"), structure)
    with mode():
        la.fit(ragged_batches())
    log_precision = torch.zeros((), dtype=torch.float64, requires_grad=True)
    la.log_marginal_likelihood(log_precision.exp()).backward()
    assert log_precision.grad is not None
    assert torch.isfinite(log_precision.grad)
    la.optimize_prior_precision(method="marglik", n_steps=3)
    assert torch.isfinite(la.prior_precision).all()


def test_float_inputs_made_in_inference_mode_can_be_fitted():
    la, expected = make(plain_model(lora_dropout=0.5)), make(plain_model(lora_dropout=0.5))
    expected.fit(pairs(3))
    with torch.inference_mode():
        la.fit(pairs(3))
        prediction = la(pairs(3)[0][0])
    torch.testing.assert_close(prediction, expected(pairs(3)[0][0]), rtol=1e-10, atol=1e-12)
