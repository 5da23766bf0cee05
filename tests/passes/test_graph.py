"""Backward passes of few or many seeds, which keep no more gradients than they must."""

from __future__ import annotations

import pytest
import torch

from laplace_lora_ext.curvature.backend import LowRankKronGGN
from laplace_lora_ext.passes import graph, record
from tests.support.models import N_CLASSES, laplace_keywords, lora_model, ragged_batches
from tests.support.posteriors import make


@pytest.mark.parametrize(("texts", "sizes"), [(4, [3]), (8, [2, 1]), (16, [1] * 3), (64, [1] * 3)])
def test_passes_take_several_seeds_where_few_rows_go_through_the_layers(texts, sizes, monkeypatch):
    monkeypatch.setattr(graph, "_ROWS", 200)
    ones = torch.ones(texts, 12, dtype=torch.long)
    model = lora_model("bert", torch.float32, target_modules=["query"])
    backend = LowRankKronGGN(model, "classification")
    scaled = []

    def visit(rows):
        if rows.index == 0:
            scaled.append(rows.g.flatten(1).sum(1))

    with record(backend.model, backend.blocks, {"input_ids": ones, "attention_mask": ones}) as seen:
        scales = torch.arange(3.0)[:, None].expand(3, texts)
        seen.backward(torch.ones(3, texts, N_CLASSES), scales, visit)
    assert [len(part) for part in scaled] == sizes
    sums = torch.cat(scaled)
    torch.testing.assert_close(sums, sums[1] * torch.arange(3.0))
    assert sums[1] != 0


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_backward_pass_keeps_gradients_of_the_first_layers_alone(kind, monkeypatch):
    """Those of every output together would be as large as the activations."""
    model = lora_model(kind, torch.float32)
    la = make(model, **laplace_keywords(kind))
    kept, grad = [], torch.autograd.grad

    def counting(*args, **kwargs):
        gradients = grad(*args, **kwargs)
        kept.append(sum(gradient is not None for gradient in gradients))
        return gradients

    monkeypatch.setattr(torch.autograd, "grad", counting)
    batches = ragged_batches()
    la.fit(batches)
    la(batches[0], link_approx="probit")
    per_layer = len(la.blocks) // model.config.num_hidden_layers
    assert len(kept) == len(batches) + 2  # one proves whose rows are whose
    assert all(0 < number < per_layer for number in kept)
