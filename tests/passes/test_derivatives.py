"""Jacobians of the logits against torch's and the host's."""

from __future__ import annotations

import laplace
import pytest
import torch

from tests.support.dense import exact_ggn, jacobians, softmax_fisher
from tests.support.models import (
    Detour,
    Sorting,
    laplace_keywords,
    lora_model,
    pairs,
    ragged_batches,
    with_lora,
)
from tests.support.posteriors import make

EXACT = {"rtol": 1e-9, "atol": 1e-12}


@pytest.mark.parametrize("kind", [Detour, Sorting])
@pytest.mark.parametrize("structure", ["lowrank_kron", "diag", "full"])
def test_a_layer_that_the_logits_do_not_depend_on_has_no_curvature(structure, kind):
    model, ((X, y),) = with_lora(kind(), "used", "unused"), pairs()
    la, alone = make(model, structure), make(model, structure, target_modules=["used"])
    for posterior in (la, alone):
        posterior.fit([(X, y)])
    torch.testing.assert_close(la(X), alone(X), **EXACT)
    log_dets = [p.log_det_posterior_precision for p in (la, alone)]
    torch.testing.assert_close(*log_dets, **EXACT)  # other blocks add log 1
    if structure != "lowrank_kron":
        H = exact_ggn(jacobians(model, X), softmax_fisher(model(X).detach()))
        torch.testing.assert_close(la.H, H.diag() if structure == "diag" else H, **EXACT)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_predictive_equals_that_of_the_hosts_jacobians(kind):
    la, batches = make(lora_model(kind), **laplace_keywords(kind)), ragged_batches()
    la.fit(batches)
    with la.model.prepared([block.weight for block in la.blocks]):
        host = laplace.curvature.CurvatureInterface(la.model, "classification")
        Js, f = host.jacobians(batches[0])
    f_mu, f_var = la.predictive_moments(batches[0])
    torch.testing.assert_close(f_mu, f, **EXACT)
    torch.testing.assert_close(f_var, la.functional_variance(Js), **EXACT)
    torch.testing.assert_close(la.backend.jacobians(batches[0])[0], Js, **EXACT)
