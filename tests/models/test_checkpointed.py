"""Gradient checkpointing outside of training."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Cache, DynamicCache

from laplace_lora_ext.models.checkpointed import checkpointed

layers = pytest.importorskip("transformers.modeling_layers")


class Layer(layers.GradientCheckpointingLayer):
    """Has dropout by its own mode, and takes a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dropout(0.5)
        self.caches: list[Cache | None] = []

    def forward(self, x: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        self.caches.append(cache)
        return self.inner(nn.functional.dropout(x, training=self.training)).exp()


@pytest.fixture
def model() -> nn.Module:
    model = nn.Sequential(Layer(), Layer()).eval()
    model[0].gradient_checkpointing = True
    model[0]._gradient_checkpointing_func = None  # ours is used instead
    return model


def test_a_checkpointed_layer_is_computed_again_without_dropout(model):
    runs = []

    def run_again(function):
        runs.append(function)
        return function()

    x = torch.ones(3, requires_grad=True)
    with checkpointed(model, run_again):
        y = model(x)
        assert not model[1].training
        (gradient,) = torch.autograd.grad(y.sum(), x)
    assert len(runs) == 1  # the other layer is not checkpointed
    assert len(model[0].caches) == 2
    assert len(model[1].caches) == 1
    torch.testing.assert_close(y, x.exp().exp())
    torch.testing.assert_close(gradient, (x.exp() + x).exp())


def test_a_checkpointed_layer_gets_no_cache(model):
    with checkpointed(model, lambda function: function):
        model[0](torch.ones(3), DynamicCache())
    assert model[0].caches == [None]


def test_the_layers_are_left_as_they_were_where_a_pass_fails(model):
    with pytest.raises(TypeError), checkpointed(model, lambda function: function):
        model("no tensor")
    assert not any(module.training for module in model.modules())
    assert model[0]._gradient_checkpointing_func is None
