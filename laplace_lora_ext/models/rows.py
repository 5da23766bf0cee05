"""What a layer was given and what it returned, as rows of a linear map."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from laplace_lora_ext.models.convolutions import PatchRows


class Rows(Protocol):
    """Makes rows of a layer's inputs and outputs.

    Attributes
    ----------
    held_column : int or None
        a column of the weight that no gradient comes to, as an embedding's of padding
    input_map : tuple
        what decides, beside the inputs, on the rows that these become
    """

    @property
    def held_column(self) -> int | None: ...

    @property
    def input_map(self) -> tuple[Any, ...]: ...

    def input_rows(self, inputs: torch.Tensor) -> torch.Tensor:
        """What the layer was given as rows `(..., n)`."""
        ...

    def output_rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """What it returned, or gradients of that, as rows `(..., m)`."""
        ...

    def row_shape(self, outputs: torch.Tensor) -> torch.Size:
        """Shape of what it returned as rows, without their size m; nothing is computed."""
        ...


class LinearRows:
    """Of a linear layer: whatever comes in and goes out."""

    held_column = None
    input_map = ()

    def input_rows(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs

    def output_rows(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs

    def row_shape(self, outputs: torch.Tensor) -> torch.Size:
        return outputs.shape[:-1]


def rows_of(layer: Any) -> Rows:
    """Of a linear layer, a convolution, or a half of an embedding's LoRA, which knows its own."""
    if isinstance(layer, nn.Linear):
        return LinearRows()
    return PatchRows(layer) if isinstance(layer, nn.Module) else layer
