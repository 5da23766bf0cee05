"""What a layer was given and what it returned, as rows of a linear map."""

from __future__ import annotations

from typing import Any

import torch


class LinearRows:
    """Rows of a linear layer: whatever comes in and goes out. Other layers have heirs of this.

    Attributes
    ----------
    input_map : tuple
        what decides, beside the inputs, on the rows that these become
    """

    @property
    def input_map(self) -> tuple[Any, ...]:
        return ()

    def input_rows(self, inputs: torch.Tensor) -> torch.Tensor:
        """What the layer was given as rows `(..., n)`."""
        return inputs

    def output_rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """What it returned, or gradients of that, as rows `(..., m)`."""
        return outputs

    def row_shape(self, outputs: torch.Tensor) -> torch.Size:
        """Shape of what it returned as rows, without their size m; nothing is computed."""
        return outputs.shape[:-1]
