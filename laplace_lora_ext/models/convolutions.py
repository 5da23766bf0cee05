"""Convolutions as linear maps of patches: their inputs, outputs and weights as rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad, unfold

from laplace_lora_ext.models.rows import LinearRows

_DIMENSIONS = {nn.Conv1d: 1, nn.Conv2d: 2}


def is_convolution(layer: Any) -> bool:
    """Whether a layer is a convolution in one or two dimensions that patches describe."""
    return type(layer) in _DIMENSIONS and layer.groups == 1


class PatchRows(LinearRows):
    """Rows of a convolution: the patches that it makes of its inputs, and its outputs' channels.

    Parameters
    ----------
    layer : torch.nn.Conv1d or torch.nn.Conv2d
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    @property
    def input_map(self) -> tuple[Any, ...]:
        """The settings that determine the patches."""
        layer = self._layer
        padding = layer.padding_mode, *layer._reversed_padding_repeated_twice
        return layer.kernel_size, layer.dilation, layer.stride, padding

    def input_rows(self, inputs: torch.Tensor) -> torch.Tensor:
        """Of `(B, channels, *positions)`, `(B, L, n)`."""
        kernel_size, dilation, stride, (mode, *padding) = self.input_map
        # PyTorch's own numbers, which also know "same" and "valid", and more on one side of a few.
        inputs = pad(inputs, padding, "constant" if mode == "zeros" else mode)
        if self._dimensions == 1:
            inputs = inputs.unsqueeze(-2)
            kernel_size, dilation, stride = (1, *kernel_size), (1, *dilation), (1, *stride)
        return unfold(inputs, kernel_size, dilation, stride=stride).mT

    def output_rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Of `(..., m, *positions)`, `(..., *positions, m)`."""
        return outputs.movedim(-1 - self._dimensions, -1)

    def row_shape(self, outputs: torch.Tensor) -> torch.Size:
        return self.output_rows(outputs).shape[:-1]

    @property
    def _dimensions(self) -> int:
        return _DIMENSIONS[type(self._layer)]
