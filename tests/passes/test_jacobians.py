"""Jacobians of the logits against torch's."""

from __future__ import annotations

import laplace
import pytest
import torch

from tests.support.dense import exact_ggn, jacobians, softmax_fisher
from tests.support.models import (
    Recurrent,
    laplace_keywords,
    lora_model,
    ragged_batches,
    sequences,
    with_lora,
)
from tests.support.posteriors import make

EXACT = {"rtol": 1e-9, "atol": 1e-12}


def test_a_layer_that_is_called_twice_has_one_jacobian():
    recurrent = with_lora(Recurrent(), "shared", "head")
    (X, y), la = sequences(), make(recurrent)
    la.fit([(X, y)])
    Js, f = la.backend.jacobians(X)
    torch.testing.assert_close(Js, jacobians(recurrent, X), **EXACT)
    torch.testing.assert_close(f, recurrent(X).detach(), **EXACT)


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_a_layer_that_is_called_twice_has_the_exact_ggn(structure):
    recurrent = with_lora(Recurrent(), "shared", "head")
    (X, y), la = sequences(), make(recurrent, structure)
    la.fit([(X, y)])
    expected = exact_ggn(jacobians(recurrent, X), softmax_fisher(recurrent(X).detach()))
    torch.testing.assert_close(la.H, expected.diag() if structure == "diag" else expected, **EXACT)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_predictive_equals_that_of_the_hosts_jacobians(kind):
    model = lora_model(kind)
    batches = ragged_batches()
    la = make(model, "lowrank_kron", **laplace_keywords(kind))
    la.fit(batches)
    with la.model.prepared([block.weight for block in la.blocks]):
        Js, f = laplace.curvature.CurvatureInterface(la.model, "classification").jacobians(
            batches[0]
        )
    f_mu, f_var = la.predictive_moments(batches[0])
    torch.testing.assert_close(f_mu, f, **EXACT)
    torch.testing.assert_close(f_var, la.functional_variance(Js), **EXACT)
    torch.testing.assert_close(la.backend.jacobians(batches[0])[0], Js, **EXACT)
