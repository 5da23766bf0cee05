"""Jacobians of the logits against torch's."""

from __future__ import annotations

import laplace
import pytest
import torch
from torch import nn

from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import find_blocks
from laplace_lora_ext.passes import jacobians as library_jacobians
from tests.support.dense import exact_ggn, jacobians, softmax_fisher
from tests.support.models import (
    Detour,
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


class SharedRows(nn.Module):
    """A layer projects the inputs, and an embedding that all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.embedding = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.layer(self.embedding)).tanh().sum(1)


@pytest.mark.parametrize("make_model", [Recurrent, SharedRows, Detour])
def test_combinations_of_the_logits_have_the_same_combinations_of_jacobians(make_model):
    targets = {Recurrent: ("shared", "head"), SharedRows: ("layer",), Detour: ("used", "unused")}
    model = with_lora(make_model(), *targets[make_model])
    X = sequences()[0] if make_model is not Detour else sequences()[0][:, 0]
    combined = torch.randn(2, len(X), 3, generator=torch.Generator().manual_seed(5)).double()
    logits = model(X).detach()

    def directions(f):
        row = (logits == f[:1]).all(-1).int().argmax()  # examples may come alone
        return combined[:, row : row + len(f)]

    for number in (2, 1):
        Js, _ = library_jacobians(
            LogitsModel(model),
            find_blocks(model),
            X,
            directions=lambda f, number=number: directions(f)[:number],
        )
        expected = torch.einsum("sbc,bcp->bsp", combined[:number], jacobians(model, X))
        torch.testing.assert_close(Js, expected, **EXACT)


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
