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
from laplace_lora_ext.curvature.decomposed import trace_of
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
TRAIN = ragged_batches(3 * (7, 4, 5))
TEST = ragged_batches((6, 3), batch_size=1)
N_TEXTS = 9


@pytest.fixture
def model():
    return lora_model("bert", hidden_size=32).eval().double()


@pytest.fixture(params=[1000, 4 * N_CLASSES + 1], ids=["all", "some"])
def n_selected(request, monkeypatch):
    """Return of how many texts posteriors are that look at all or at some."""
    monkeypatch.setattr(functional, "MOST_ROWS", request.param)
    return min(N_TEXTS, request.param // N_CLASSES)


def fitted(cls: type[FunctionSpaceLaplace], model: Any) -> Any:
    la = cls.of(AdaptedModel(model))
    la.prior_precision = 7.0  # a fit knows nothing of the prior of predictions
    la.fit(TRAIN)
    la.prior_precision = PRIOR
    return la


def dense(model: Any, batches: Sequence[Any]) -> tuple[Tensor, Tensor]:
    Js = torch.cat([jacobians(model, batch) for batch in batches])
    logits = torch.cat([batch_logits(model, batch) for batch in batches])
    return Js, logits


def assert_linear(la: Any, features: Tensor, curvature: Tensor) -> None:
    """Demand covariances of a linear model in features `(parameters, features)`."""
    of_test, _ = dense(la.model.model, TEST)
    prior = torch.full((len(curvature),), PRIOR).double()
    found = torch.cat([la.predictive_moments(batch).f_var for batch in TEST])
    assert_close(found, glm_covariance(of_test @ features, curvature, prior))


def test_subset_of_data_is_the_generalised_linear_model(model, n_selected):
    la = fitted(SubsetLaplace, model)
    Js, logits = (each[:n_selected] for each in dense(model, TRAIN))
    p = logits.softmax(-1)
    # The host's likelihood knows of no covariance between logits.
    curvature = exact_ggn(Js, torch.diag_embed(p * (1 - p)))
    assert_linear(la, torch.eye(len(curvature)).double(), curvature)


def test_ella_is_the_generalised_linear_model_in_its_features(model, n_selected):
    la = fitted(ELLALaplace, model)
    Js, logits = dense(model, TRAIN)
    # The unit of a search by few texts, whichever texts the posterior looks at.
    whole = exact_ggn(Js, softmax_fisher(logits))
    assert trace_of(la.H) == pytest.approx(whole.trace().item())
    directions = la.H.host.dual_directions[:-N_CLASSES]
    features = Js[:n_selected].flatten(0, 1).T @ la.H.basis.coordinates @ directions
    n_kept = round(0.75 * n_selected)
    assert_close(features.T @ features, torch.eye(n_kept).double())
    assert_linear(la, features, exact_ggn(Js @ features, softmax_fisher(logits)))


def test_valla_conditions_on_the_labels_logits(model, n_selected, monkeypatch):
    monkeypatch.setattr(functional, "STEPS", 20)
    la = fitted(VaLLALaplace, model)
    Js, _ = dense(model, TRAIN)
    inducing = Js[torch.arange(n_selected), labels_of(TRAIN)[:n_selected]]
    root = inducing.T @ la.H.host._factor_matrix().detach()
    assert_linear(la, torch.eye(len(root)).double(), root @ root.T)
