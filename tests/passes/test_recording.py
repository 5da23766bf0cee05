"""Recorded forward passes, and backward passes of few or many seeds."""

from __future__ import annotations

import pytest
import torch

from laplace_lora_ext.curvature.backend import LowRankKronGGN
from laplace_lora_ext.likelihoods import Seeds
from laplace_lora_ext.passes import record
from laplace_lora_ext.passes import recording as passes
from tests.support.dense import (
    exact_ggn,
    gradient_curvature,
    jacobians,
    softmax_fisher,
)
from tests.support.models import (
    N_CLASSES,
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


def test_calls_of_a_layer_count_as_positions_in_expand():
    recurrent = with_lora(Recurrent(), "shared", "head")
    la = make(recurrent, backend_kwargs={"kfac_approx": "expand"})
    la.fit([sequences(n=4, length=3)])
    normalizers = {b.name: k.normalizer for b, k in zip(la.blocks, la.H_facs.blocks, strict=True)}
    assert normalizers["shared.lora_A.default.weight"] == 2 * 4 * 3
    assert normalizers["head.lora_A.default.weight"] == 4


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag", "full"])
def test_a_layer_that_the_logits_do_not_depend_on_has_no_curvature(structure):
    model = with_lora(Detour(), "used", "unused")
    la, alone = make(model, structure), make(model, structure, target_modules=["used"])
    X, y = sequences()
    for posterior in (la, alone):
        posterior.fit([(X[:, 0], y)])
    torch.testing.assert_close(la(X[:, 0]), alone(X[:, 0]), **EXACT)
    torch.testing.assert_close(
        la.log_det_posterior_precision, alone.log_det_posterior_precision, **EXACT
    )  # at a prior precision of 1 the other blocks add log 1


@pytest.mark.parametrize(("texts", "at_once"), [(4, 3), (8, 2), (16, 1), (64, 1)])
def test_passes_take_several_seeds_where_few_rows_go_through_the_layers(
    texts, at_once, monkeypatch
):
    monkeypatch.setattr(passes, "_ROWS", 200)
    model = lora_model("bert", torch.float32)
    batch = {
        "input_ids": torch.ones(texts, 12, dtype=torch.long),
        "attention_mask": torch.ones(texts, 12, dtype=torch.long),
    }
    backend = LowRankKronGGN(model, "classification")
    sizes = []
    with record(backend.model, backend.blocks, batch) as recorded:
        seeds = torch.ones(3, texts, N_CLASSES)
        scales = torch.arange(3.0)[:, None].expand(3, texts)
        scaled = []

        def visit(rows):
            if rows.index == 0:
                sizes.append(len(rows.g))
                scaled.append(rows.g.flatten(1).sum(1))

        recorded.backward(Seeds(seeds, scales), visit)
    assert sizes == {3: [3], 2: [2, 1], 1: [1, 1, 1]}[at_once]
    sums = torch.cat(scaled)
    torch.testing.assert_close(sums, sums[1] * torch.arange(3.0))
    assert sums[1] != 0


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_backward_pass_keeps_gradients_of_the_first_layers_alone(kind, monkeypatch):
    """Those of every output together would be as large as the activations."""
    model = lora_model(kind, torch.float32)
    la = make(model, **laplace_keywords(kind))
    kept = []
    grad = torch.autograd.grad

    def counting(*args, **kwargs):
        gradients = grad(*args, **kwargs)
        kept.append(sum(gradient is not None for gradient in gradients))
        return gradients

    monkeypatch.setattr(torch.autograd, "grad", counting)
    batches = ragged_batches()
    la.fit(batches)
    la(batches[0], link_approx="probit")
    per_layer = len(la.blocks) // model.config.num_hidden_layers
    assert len(kept) == len(batches) + 1
    assert all(0 < number < per_layer for number in kept)
