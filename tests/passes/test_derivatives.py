"""Jacobians of the logits against torch's and the host's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import find_blocks
from laplace_lora_ext.passes import jacobians as library_jacobians
from tests.support.dense import assert_exact, jacobians
from tests.support.models import (
    Detour,
    Sorting,
    pairs,
    with_lora,
)
from tests.support.posteriors import make

EXACT = {"rtol": 1e-9, "atol": 1e-12}


@pytest.mark.parametrize("kind", [Detour, Sorting])
@pytest.mark.parametrize("structure", ["lowrank_kron", "diag", "full"])
def test_a_layer_that_the_logits_do_not_depend_on_has_no_curvature(structure, kind):
    model, ((X, y),) = with_lora(kind(), "used", "unused"), pairs()
    settings = {"backend_kwargs": {"rank": 100}} if structure == "lowrank_kron" else {}
    la, alone = (
        make(model, structure, target_modules=names, **settings) for names in (None, ["used"])
    )
    for posterior in (la, alone):
        posterior.fit([(X, y)])
    torch.testing.assert_close(la(X), alone(X), **EXACT)
    log_dets = [p.log_det_posterior_precision for p in (la, alone)]
    torch.testing.assert_close(*log_dets, **EXACT)  # other blocks add log 1
    assert_exact(la, model, [X])


class SharedRows(nn.Module):
    """A layer projects the inputs, and an embedding that all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.embedding = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.layer(self.embedding)).tanh()


@pytest.mark.parametrize("kind", [SharedRows, Detour])
@pytest.mark.parametrize("number", [1, 2])
def test_combinations_of_the_logits_have_the_same_combinations_of_jacobians(kind, number):
    layers = {SharedRows: ("layer",), Detour: ("used", "unused")}[kind]
    model, ((X, _),) = with_lora(kind(), *layers), pairs()
    combined = torch.randn(number, len(X), 3, generator=torch.Generator().manual_seed(5)).double()
    blocks = find_blocks(model)
    Js, _ = library_jacobians(LogitsModel(model), blocks, X, directions=lambda _: combined)
    expected = torch.einsum("sbc,bcp->bsp", combined, jacobians(model, X))
    torch.testing.assert_close(Js, expected, **EXACT)
