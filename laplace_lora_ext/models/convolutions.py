"""Convolutions as linear maps of patches: their inputs, outputs and weights as rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad, unfold

from laplace_lora_ext.models.rows import LinearRows


class PatchRows(LinearRows):
    """Rows of a convolution: the patches that it makes of its inputs, and its outputs' channels.

    Parameters
    ----------
    layer : torch.nn.Conv1d or torch.nn.Conv2d
    """

    def __init__(self, layer: Any) -> None:
        self._layer, self._n_dimensions = layer, layer.weight.ndim - 2

    @property
    def input_map(self) -> tuple[Any, ...]:
        return (id(self._layer),)

    def input_rows(self, inputs: torch.Tensor) -> torch.Tensor:
        """Of `(B, channels, *positions)`, `(B, L, n)`."""
        layer, more = self._layer, 2 - self._n_dimensions
        # PyTorch's own numbers, which also know "same" and "valid", and more on one side of a few.
        padding = layer._reversed_padding_repeated_twice
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        inputs = pad(inputs, padding, mode).unflatten(1, (-1, *(1,) * more))
        settings = (layer.kernel_size, layer.dilation, layer.stride)
        kernel_size, dilation, stride = ((1,) * more + setting for setting in settings)
        return unfold(inputs, kernel_size, dilation, stride=stride).mT

    def output_rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Of `(..., m, *positions)`, `(..., *positions, m)`."""
        return outputs.movedim(-1 - self._n_dimensions, -1)

    def row_shape(self, outputs: torch.Tensor) -> torch.Size:
        return self.output_rows(outputs).shape[:-1]
