"""The host's function-space posteriors: their kernels are those of all LoRA weights."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from benchmarks.methods import functional
from benchmarks.methods.functional import (
    ELLALaplace,
    FunctionSpaceLaplace,
    SubsetLaplace,
    VaLLALaplace,
)
from benchmarks.models import AdaptedModel
from tests.support.dense import (
    batch_logits,
    exact_ggn,
    glm_covariance,
    jacobians,
    labels_of,
    softmax_fisher,
)
from tests.support.models import N_CLASSES, lora_model, ragged_batches

PRIOR = 0.3
TEXTS = 3 * (7, 4, 5)


@pytest.fixture
def model():
    return lora_model("bert", hidden_size=32).eval().double()


@pytest.fixture(params=[1000, 4 * N_CLASSES + 1], ids=["all", "some"])
def n_selected(request, monkeypatch):
    """Return of how many texts posteriors are that look at all or at some."""
    monkeypatch.setattr(functional, "MOST_ROWS", request.param)
    return min(len(TEXTS), request.param // N_CLASSES)


def fitted(cls: type[FunctionSpaceLaplace], model: Any, batches: Any) -> Any:
    la = cls.of(AdaptedModel(model))
    la.prior_precision = 7.0  # a fit knows nothing of the prior of predictions
    la.fit(batches)
    la.prior_precision = PRIOR
    return la


def dense(model: Any, batches: Sequence[Any]) -> tuple[Tensor, Tensor]:
    Js = torch.cat([jacobians(model, batch) for batch in batches])
    logits = torch.cat([batch_logits(model, batch) for batch in batches])
    return Js, logits


def covariances(la: Any, batches: Sequence[Any]) -> Tensor:
    return torch.cat([la.predictive_moments(batch).f_var for batch in batches])


def test_subset_of_data_is_the_generalised_linear_model(model, n_selected):
    train, test = ragged_batches(TEXTS), ragged_batches((6, 3))
    la = fitted(SubsetLaplace, model, train)
    Js, logits = (each[:n_selected] for each in dense(model, train))
    p = logits.softmax(-1)
    # The host's likelihood knows of no covariance between logits.
    precision = exact_ggn(Js, torch.diag_embed(p * (1 - p)))
    of_test, _ = dense(model, test)
    prior = torch.full((len(precision),), PRIOR).double()
    assert_close(covariances(la, test), glm_covariance(of_test, precision, prior))


def test_ella_is_the_generalised_linear_model_in_its_features(model, n_selected):
    train, test = ragged_batches(TEXTS), ragged_batches((6, 3))
    la = fitted(ELLALaplace, model, train)
    Js, logits = dense(model, train)
    directions = la.H.host.dual_directions[: -logits.shape[-1]]
    features = Js[:n_selected].flatten(0, 1).T @ la.H.basis.coordinates @ directions
    n_kept = round(0.75 * n_selected)
    assert_close(features.T @ features, torch.eye(n_kept).double())
    curvature = exact_ggn(Js @ features, softmax_fisher(logits))
    of_test, _ = dense(model, test)
    prior = torch.full((n_kept,), PRIOR).double()
    expected = glm_covariance(of_test @ features, curvature, prior)
    assert_close(covariances(la, test), expected)


def test_valla_conditions_on_the_labels_logits(model, n_selected, monkeypatch):
    monkeypatch.setattr(functional, "STEPS", 20)
    train, test = ragged_batches(TEXTS), ragged_batches((6, 3))
    la = fitted(VaLLALaplace, model, train)
    host = la.H.host
    Js, _ = dense(model, train)
    inducing = Js[torch.arange(n_selected), labels_of(train)[:n_selected]]
    root = inducing.T @ host._factor_matrix().detach()
    of_test, _ = dense(model, test)
    prior = torch.full((len(root),), PRIOR).double()
    assert_close(covariances(la, test), glm_covariance(of_test, root @ root.T, prior))


def test_held_out_texts_choose_the_prior(model):
    la = fitted(SubsetLaplace, model, ragged_batches(TEXTS))
    held = ragged_batches(seed=5)
    la.optimize_prior_precision(method="gridsearch", val_loader=held, grid_size=5)
    assert la.predict_proba(held).sum(-1) == pytest.approx(1)


def test_texts_that_are_alike_leave_fewer_directions(model):
    la = fitted(ELLALaplace, model, 8 * ragged_batches((7, 4, 5)))
    # Three texts have no more rows than this, and 18 directions are asked for first.
    assert la.H.host.n_eigenvalues == 9 == 3 * N_CLASSES
