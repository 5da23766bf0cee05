"""Convolutions as linear maps of patches: their inputs, outputs and weights as rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import unfold

_DIMENSIONS = {nn.Conv1d: 1, nn.Conv2d: 2}


def is_convolution(layer: Any) -> bool:
    """Whether a layer is a convolution in one or two dimensions that patches describe."""
    return (
        type(layer) in _DIMENSIONS
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def patching(layer: Any) -> tuple[Any, ...]:
    """The settings that determine which patches a convolution makes of its inputs."""
    return layer.kernel_size, layer.dilation, layer.padding, layer.stride


def patches(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Inputs `(B, channels, *positions)` of a convolution as rows `(B, L, n)` of its patches."""
    if _DIMENSIONS[type(layer)] == 1:
        settings = ((1, *layer.kernel_size), (1, *layer.dilation), (0, *layer.padding))
        return unfold(inputs.unsqueeze(-2), *settings, (1, *layer.stride)).mT
    return unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride).mT


def channels_last(layer: Any, outputs: torch.Tensor) -> torch.Tensor:
    """Outputs `(..., m, *positions)` of a convolution as rows `(..., *positions, m)`."""
    return outputs.movedim(-1 - _DIMENSIONS[type(layer)], -1)
