"""Layers as linear maps of the rows that they are given."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace_lora_ext.models.lora_layers import Block
from laplace_lora_ext.models.selection import is_convolution

LAYERS = [
    nn.Linear(7, 3, bias=False),
    nn.Conv1d(2, 3, 3, stride=2, padding=1, dilation=2, bias=False),
    nn.Conv1d(2, 3, 4, padding="same", bias=False),  # two zeros behind, one before
    nn.Conv1d(2, 3, 3, padding=1, padding_mode="reflect", bias=False),
    nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(0, 1), dilation=(2, 1), bias=False),
    nn.Conv2d(2, 3, 2, padding="valid", bias=False),  # SigLIP's patches
    nn.Conv2d(2, 3, (3, 2), padding="same", dilation=(1, 3), bias=False),
    nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="circular", bias=False),
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_a_layer_is_a_linear_map_of_its_rows(layer):
    n_dimensions = max(1, layer.weight.ndim - 2)
    x = torch.randn(4, 2, *(7,) * n_dimensions)
    rows, y = Block("", layer, True).rows, layer(x)
    inputs, outputs = rows.input_rows(x), rows.output_rows(y)
    torch.testing.assert_close(inputs @ layer.weight.flatten(1).T, outputs.reshape(4, -1, 3))
    assert rows.row_shape(y) == outputs.shape[:-1]
    gradients = torch.randn(5, *y.shape)  # a dimension of seeds in front
    by_seed = torch.stack([rows.output_rows(g) for g in gradients])
    assert torch.equal(rows.output_rows(gradients), by_seed)


def test_what_patches_do_not_describe():
    assert all(map(is_convolution, LAYERS[1:]))
    others = nn.Conv3d(2, 3, 1), nn.ConvTranspose1d(2, 3, 1), nn.Conv1d(2, 4, 1, groups=2)
    assert not any(map(is_convolution, others))
