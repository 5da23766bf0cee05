"""Gradient checkpointing outside of training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace_lora_ext.models.checkpointed import checkpointed

layers = pytest.importorskip("transformers.modeling_layers")


class Layer(layers.GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).exp()


@pytest.fixture
def model() -> nn.Module:
    model = nn.Sequential(Layer(), Layer()).eval()
    model[0].gradient_checkpointing = True
    model[0]._gradient_checkpointing_func = None  # ours is used instead
    return model


def test_the_layers_are_left_as_they_were_where_a_pass_fails(model):
    with pytest.raises(TypeError), checkpointed(model, lambda function: function):
        model("no tensor")
    assert not any(module.training for module in model.modules())
    assert model[0]._gradient_checkpointing_func is None
