"""Recorded forward passes: calls of a layer joined, with the mask of their positions."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from laplace_lora_ext.curvature.backend import LowRankKronGGN
from laplace_lora_ext.passes import record
from tests.support.dense import (
    exact_ggn,
    gradient_curvature,
    jacobians,
    softmax_fisher,
)
from tests.support.models import (
    VOCABULARY,
    Detour,
    Recurrent,
    Sorting,
    pairs,
    ragged_batches,
    sequences,
    with_lora,
)
from tests.support.posteriors import make

EXACT = {"rtol": 1e-9, "atol": 1e-12}


def test_a_layer_that_is_called_twice_has_the_curvature_of_its_jacobian():
    recurrent = with_lora(Recurrent(), "shared", "head")
    (X, y), la = sequences(), make(recurrent)
    la.fit([(X, y)])
    Js, H = jacobians(recurrent, X), softmax_fisher(recurrent(X).detach())
    torch.testing.assert_close(la.H.to_matrix(), gradient_curvature(recurrent, Js, H), **EXACT)
    torch.testing.assert_close(la.H.to_matrix().trace(), exact_ggn(Js, H).trace(), **EXACT)


def test_a_layer_that_is_called_twice_predicts_from_its_jacobian():
    recurrent = with_lora(Recurrent(), "shared", "head")
    (X, y), la = sequences(), make(recurrent)
    la.fit([(X, y)])
    Js = jacobians(recurrent, X)
    precision = la.H.to_matrix() + la.prior_precision * torch.eye(la.n_params).double()
    expected = Js @ precision.inverse() @ Js.mT
    f_mu, f_var = la.predictive_moments(X)
    torch.testing.assert_close(f_mu, recurrent(X).detach(), **EXACT)
    torch.testing.assert_close(f_var, expected, **EXACT)
    torch.testing.assert_close(la.functional_variance(Js), expected, **EXACT)


class Pooling(nn.Module):
    """Calls its layer on all positions, and then on their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 5)
        self.layer = nn.Linear(5, 5)

    def forward(self, batch: Mapping) -> torch.Tensor:
        weights = batch["attention_mask"] / batch["attention_mask"].sum(1, keepdim=True)
        rows = self.layer(self.embed(batch["input_ids"])).tanh()
        return self.layer(torch.einsum("bt,btd->bd", weights.to(rows), rows))[:, :3]


def test_calls_of_a_layer_count_as_positions_in_expand():
    recurrent = with_lora(Recurrent(), "shared", "head")
    la = make(recurrent, backend_kwargs={"kfac_approx": "expand"})
    la.fit([sequences(n=4, length=3)])
    normalizers = {b.name: k.normalizer for b, k in zip(la.blocks, la.H_facs.blocks, strict=True)}
    assert normalizers["shared.lora_A.default.weight"] == 2 * 4 * 3
    assert normalizers["head.lora_A.default.weight"] == 4


@pytest.mark.parametrize("kind", [Detour, Sorting])
@pytest.mark.parametrize("structure", ["lowrank_kron", "diag", "full"])
def test_a_layer_that_the_logits_do_not_depend_on_has_no_curvature(structure, kind):
    model = with_lora(kind(), "used", "unused")
    la, alone = make(model, structure), make(model, structure, target_modules=["used"])
    X, y = sequences()
    for posterior in (la, alone):
        posterior.fit([(X[:, 0], y)])
    torch.testing.assert_close(la(X[:, 0]), alone(X[:, 0]), **EXACT)
    torch.testing.assert_close(
        la.log_det_posterior_precision, alone.log_det_posterior_precision, **EXACT
    )  # at a prior precision of 1 the other blocks add log 1


def test_each_call_of_a_layer_has_the_mask_of_its_own_positions():
    """A pooled call beside one of all positions."""
    model = with_lora(Pooling(), "layer")
    (batch,) = ragged_batches(lengths=(5, 3, 4), padded_to=5)
    interface = LowRankKronGGN(model, "classification")
    valid = {}
    with record(interface.model, interface.blocks, batch) as recorded:
        recorded.backward(
            interface.seeds(recorded.logits.detach(), batch["labels"]),
            lambda rows: valid.setdefault(rows.index, rows.valid()),
        )
    mask = batch["attention_mask"].bool()
    expected = torch.cat([torch.ones(3, 1).bool(), mask], dim=1)
    for found in valid.values():  # in the order in which gradients come
        assert torch.equal(found, expected)


class InPlace(nn.Module):
    """Overwrites what its first layer was given, as `x += block(x)` does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x += self.first(x).tanh()
        return self.second(x)


class Apart(InPlace):
    """The same function, nothing overwritten."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x + self.first(x).tanh())


@pytest.mark.parametrize("kfac_approx", ["gradient", "expand"])
def test_inputs_that_the_model_overwrites_are_those_that_its_layers_saw(kfac_approx):
    """Dropout hands over copies in training, and the very tensors afterwards."""
    results = []
    for kind in (InPlace, Apart):
        model = with_lora(kind(), "first", "second", lora_dropout=0.1).eval()
        la = make(model, backend_kwargs={"rank": 100, "kfac_approx": kfac_approx})
        la.fit(pairs(2))
        forwards = []
        la.model.register_forward_hook(lambda *_, forwards=forwards: forwards.append(1))
        moments = la.predictive_moments(pairs()[0][0])
        assert len(forwards) == 1  # it is known by now which inputs must be copied
        results.append((la.H.to_matrix(), *moments))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
