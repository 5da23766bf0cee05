"""Nothing but the posterior changes, also after an exception."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.support.models import (
    laplace_keywords,
    lora_model,
    pairs,
    plain_model,
    ragged_batches,
)
from tests.support.posteriors import generator, make, with_structures
from tests.support.snapshots import Snapshot, half_trained

# What rounding leaves of float64.
CLOSE = {"rtol": 1e-10, "atol": 1e-12}

# --- construction and fit -------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"structure": "lowrank_kron"},
        {"structure": "kron"},
        {"structure": "diag"},
        {"structure": "full"},
        {"backend_kwargs": {"kfac_approx": "expand"}},
    ],
)
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_construction_and_fit_leave_everything(kind, settings):
    model = half_trained(lora_model(kind))
    batches = ragged_batches()
    keywords = laplace_keywords(kind)
    before = Snapshot(model)
    la = make(model, **settings, **keywords)
    before.assert_equal(model)
    la.fit(batches)
    before.assert_equal(model)
    la.fit(batches, override=False)
    before.assert_equal(model)
    # The texts are the user's as well.
    assert_close(batches, ragged_batches(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["nowhere"]}, "No LoRA layer matches"),
        ({"backend_kwargs": {"rank": -1}}, "rank"),
    ],
)
def test_a_failing_construction_leaves_everything(settings, message):
    model = half_trained(lora_model("bert"))
    batches = ragged_batches()
    before = Snapshot(model)
    with pytest.raises(ValueError, match=message):
        make(model, **settings).fit(batches)
    before.assert_equal(model)


# --- uses of a posterior --------------------------------------------------------------


def half_trained_posterior(structure: str):
    """Fit a posterior, whose model is unlike any default."""
    model = half_trained(lora_model("bert"))
    la = make(model, structure=structure)
    la.fit(ragged_batches())
    return la


# Each is given a batch's inputs and a loader, whether it needs them or not.


def predict(la, X, loader):
    la(X)


def predict_by_mean_field(la, X, loader):
    la(X, link_approx="mean_field")


def compute_evidence(la, X, loader):
    la.log_marginal_likelihood()


def restore_its_state(la, X, loader):
    state = la.state_dict()
    la.load_state_dict(state)


def choose_by_agreement(la, X, loader):
    la.optimize_prior_precision(method="agreement", train_loader=loader)


def choose_by_evidence(la, X, loader):
    la.optimize_prior_precision(n_steps=3)


def choose_by_gridsearch(la, X, loader):
    la.optimize_prior_precision(
        method="gridsearch",
        val_loader=loader,
        grid_size=3,
    )


def predict_by_glm_and_nn_with_a_generator(la, X, loader):
    for pred_type in ("glm", "nn"):
        la(
            X,
            pred_type=pred_type,
            link_approx="mc",
            generator=generator(),
        )


USES = [
    predict,
    predict_by_mean_field,
    compute_evidence,
    restore_its_state,
    choose_by_agreement,
    choose_by_evidence,
    choose_by_gridsearch,
    predict_by_glm_and_nn_with_a_generator,
]


@pytest.mark.parametrize(("structure", "use"), with_structures(USES))
def test_uses_leave_everything(structure, use):
    la = half_trained_posterior(structure)
    batches = ragged_batches()
    before = Snapshot(la.model.model)
    use(la, batches[0], batches)
    before.assert_equal(la.model.model)


def predict_by_glm_and_draws(la, X, loader):
    la(X, link_approx="mc", n_samples=3)


def predict_by_networks(la, X, loader):
    la(
        X,
        pred_type="nn",
        link_approx="mc",
        n_samples=2,
    )


def draw_weights(la, X, loader):
    la.sample(3)


def draw_functions(la, X, loader):
    la.functional_samples(X, pred_type="nn", n_samples=2)


def draw_predictions(la, X, loader):
    la.predictive_samples(X, n_samples=2)


DRAWS = [
    predict_by_glm_and_draws,
    predict_by_networks,
    draw_weights,
    draw_functions,
    draw_predictions,
]


@pytest.mark.parametrize(("structure", "use"), with_structures(DRAWS))
def test_draws_leave_everything_but_the_random_state(structure, use):
    la = half_trained_posterior(structure)
    batches = ragged_batches()
    before = Snapshot(la.model.model)
    use(la, batches[0], batches)
    before.assert_equal(la.model.model, random_state=False)


@pytest.mark.parametrize(
    ("structure", "use"),
    with_structures(
        [predict, predict_by_networks, draw_functions, choose_by_gridsearch]
    ),
)
def test_a_failing_prediction_leaves_everything(structure, use):
    model = half_trained(plain_model(lora_dropout=0.5))
    la = make(model, structure)
    la.fit(pairs(3))
    ((X, _),) = pairs()
    expected = la(X)
    before = Snapshot(model)
    too_narrow = X[:, :4]
    labels = torch.zeros(4).long()
    loader = [(too_narrow, labels)]
    # torch's error, for matrices that do not fit.
    with pytest.raises(RuntimeError):
        use(la, too_narrow, loader)
    # Weights had been drawn by then.
    before.assert_equal(model, random_state=False)
    found = la(X)
    assert torch.equal(found, expected)


# --- without gradients ----------------------------------------------------------------


class Texts:
    """An encoder, and batches that name their inputs."""

    def model(self) -> nn.Module:
        return lora_model("bert")

    def batches(self) -> list[Any]:
        return ragged_batches()

    def inputs(self) -> Any:
        first, *_ = self.batches()
        return first


class Numbers:
    """A plain module, and batches of inputs and labels."""

    def model(self) -> nn.Module:
        return plain_model(lora_dropout=0.5)

    def batches(self) -> list[Any]:
        return pairs(3)

    def inputs(self) -> Any:
        ((X, _), *_) = self.batches()
        return X


TEXTS = Texts()
NUMBERS = Numbers()


@pytest.mark.parametrize(
    ("kind", "structure", "mode"),
    [
        (TEXTS, "lowrank_kron", torch.no_grad),
        (TEXTS, "lowrank_kron", torch.inference_mode),
        (TEXTS, "kron", torch.inference_mode),
        (TEXTS, "full", torch.inference_mode),
        (NUMBERS, "lowrank_kron", torch.inference_mode),
    ],
)
def test_construction_fit_predictions_and_tuning_are_the_same_without_gradients(
    kind, structure, mode
):
    with_gradients = make(kind.model(), structure)
    with_gradients.fit(kind.batches())
    model = half_trained(kind.model())
    before = Snapshot(model)
    with mode():
        was_inference = torch.is_inference_mode_enabled()
        la = make(model, structure)
        # Tensors made here are inference tensors in inference mode.
        la.fit(kind.batches())
        X = kind.inputs()
        found = la(X)
        predict_by_networks(la, X, None)
        # The user's mode is as it was.
        assert torch.is_inference_mode_enabled() == was_inference
        assert not torch.is_grad_enabled()
    before.assert_equal(model, random_state=False)
    expected = with_gradients(kind.inputs())
    assert_close(found, expected, **CLOSE)
    found = la.log_marginal_likelihood()
    expected = with_gradients.log_marginal_likelihood()
    assert_close(found, expected, rtol=1e-10, atol=0)

    # Once gradients are back, the prior can be learnt.
    log_precision = torch.zeros((), dtype=torch.float64, requires_grad=True)
    evidence = la.log_marginal_likelihood(log_precision.exp())
    evidence.backward()
    assert log_precision.grad.isfinite()
    la.optimize_prior_precision(method="marglik", n_steps=3)
    assert la.prior_precision.isfinite().all()
