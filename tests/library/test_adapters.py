"""Kinds of adapters beside plain LoRA: curvature and covariances against dense Jacobians."""

from __future__ import annotations

import pytest
import torch
from laplace.curvature.curvlinops import CurvlinopsGGN
from torch import nn

from tests.support.dense import exact_ggn, gradient_curvature, jacobians, softmax_fisher
from tests.support.models import TwoLinear, pairs, with_lora
from tests.support.posteriors import make


def with_dora() -> nn.Module:
    """Its magnitudes are not the norms that they begin with."""
    model = with_lora(TwoLinear(), "first", "second", use_dora=True)
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.data.mul_(torch.linspace(0.5, 2, len(parameter)).double())
    return model


@pytest.mark.parametrize("n", [5, 4])
def test_dora_has_the_jacobians_that_autograd_has(n):
    """With five examples, the identity that `lora_A` is called with has as many rows."""
    model, batches = with_dora(), pairs(2, n)
    la = make(model, backend_kwargs={"rank": 100})
    la.fit(batches)
    Js = torch.cat([jacobians(model, X) for X, _ in batches])
    f_mu = torch.cat([model(X) for X, _ in batches]).detach()
    H = gradient_curvature(model, Js, softmax_fisher(f_mu))
    torch.testing.assert_close(la.H.to_matrix(), H, rtol=1e-9, atol=1e-12)
    covariance = Js @ torch.linalg.inv(H + torch.eye(len(H)).double()) @ Js.mT
    f_var = torch.cat([la.predictive_moments(X).f_var for X, _ in batches])
    torch.testing.assert_close(f_var, covariance, rtol=1e-9, atol=1e-12)


def test_doras_identity_is_no_input_of_expand():
    model, (X, y) = with_dora(), pairs(1, 5)[0]
    la = make(model, backend_kwargs={"rank": 100, "kfac_approx": "expand"})
    la.fit([(X, y)])
    assert [block.normalizer for block in la.H_facs.blocks] == [5] * 4
    of_first_A = la.H_facs.blocks[0]
    torch.testing.assert_close(of_first_A.input_factor.trace, X.square().sum())


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_dora_in_the_hosts_structures(structure):
    model, batches = with_dora(), pairs(2)
    with pytest.raises(NotImplementedError, match=r"backends don't know DoRA.*first\.lora_A"):
        make(model, structure, backend=CurvlinopsGGN)
    if structure == "kron":
        return
    la = make(model, structure)
    la.fit(batches)
    Js = torch.cat([jacobians(model, X) for X, _ in batches])
    f_mu = torch.cat([model(X) for X, _ in batches]).detach()
    H = exact_ggn(Js, softmax_fisher(f_mu))
    torch.testing.assert_close(la.H, H if structure == "full" else H.diagonal())
