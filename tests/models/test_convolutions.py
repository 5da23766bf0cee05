"""Convolutions as linear maps of patches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace_lora_ext.models.convolutions import channels_last, is_convolution, patches

LAYERS = [
    nn.Conv1d(2, 3, 3, stride=2, padding=1, dilation=2, bias=False),
    nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(0, 1), dilation=(2, 1), bias=False),
    nn.Conv2d(2, 3, 1, bias=False),
]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_convolution_is_a_linear_map_of_its_patches(layer):
    x = torch.randn(4, 2, *(7,) * (layer.weight.ndim - 2))
    rows = channels_last(layer, layer(x)).flatten(1, -2)
    torch.testing.assert_close(patches(layer, x) @ layer.weight.flatten(1).T, rows)
    gradients = torch.randn(5, *layer(x).shape)  # a dimension of seeds in front
    by_seed = torch.stack([channels_last(layer, g) for g in gradients])
    assert torch.equal(channels_last(layer, gradients), by_seed)


def test_what_patches_do_not_describe():
    assert all(map(is_convolution, LAYERS))
    others = [
        nn.Linear(2, 3),
        nn.Conv3d(2, 3, 1),
        nn.ConvTranspose1d(2, 3, 1),
        nn.Conv1d(2, 4, 1, groups=2),
        nn.Conv1d(2, 3, 3, padding="same"),
        nn.Conv1d(2, 3, 3, padding=1, padding_mode="reflect"),
    ]
    assert not any(map(is_convolution, others))
