"""Finds out, by trying, how a model numbers the positions of left-padded texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from laplace_lora_ext.messages import warn

Predict = Callable[[Mapping[str, Any], bool], torch.Tensor]
"""Logits `(B, C)` of inputs; True passes positions that count from the first real token."""

# How far rounding may move logits, relative to the largest: in half precision, and in others.
_ROUNDING_OF_HALF, _ROUNDING = 0.05, 1e-3


def rounding_of(logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How far two computations of the same logits may differ in a precision."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    return (_ROUNDING_OF_HALF if is_half else _ROUNDING) * logits.abs().max()


class LeftPadding:
    """Whether to pass positions, so that left padding does not change predictions.

    Many models with learned positions also count the padding. Others count from the first real
    token by themselves, from the padding's index, or in three dimensions. The first left-padded
    batch decides: one of its texts is predicted alone, padded, and padded with positions that count
    from its first token. They are passed from then on if they bring the text clearly nearer to its
    prediction alone; else the model keeps its own way.

    Parameters
    ----------
    can_pass : bool
        whether the model takes positions, and may be given them

    Attributes
    ----------
    passes : bool or None
        the verdict; None before there is one
    """

    def __init__(self, can_pass: bool) -> None:
        self._can_pass = can_pass
        self.passes: bool | None = None

    def is_open(self, inputs: Any) -> bool:
        """Whether this batch must decide: it is the first with left padding but no positions."""
        if self.passes is not None or not isinstance(inputs, Mapping) or "position_ids" in inputs:
            return False
        mask = inputs.get("attention_mask")
        return isinstance(mask, torch.Tensor) and mask.ndim == 2 and not mask[:, 0].all().item()

    def settle(self, inputs: Mapping[str, Any], predict: Predict) -> None:
        """Decide, by three predictions of one text.

        Warns
        -----
        UserWarning
            If the text's prediction depends on its padding anyway, or can't be checked.
        """
        mask = inputs["attention_mask"].bool()
        row = int(mask.int().argmax(-1).argmax())  # the one with the most padding
        first = int(mask[row].int().argmax())
        padded = {key: _rows(value, row, 0, mask.shape) for key, value in inputs.items()}
        alone = {key: _rows(value, row, first, mask.shape) for key, value in inputs.items()}
        self.passes = False
        try:
            expected = predict(alone, False)
            apart = (predict(padded, False) - expected).abs().max()
            if self._can_pass:
                with_positions = (predict(padded, True) - expected).abs().max()
                self.passes = bool(with_positions < apart / 2)
                apart = torch.minimum(apart, with_positions)
        except Exception as error:
            warn(
                "Can't check whether left padding changes the model's predictions "
                f"({type(error).__name__}: {error}). Pad on the right to be sure."
            )
            return
        if apart > rounding_of(expected, expected.dtype):
            warn(
                "The model's predictions depend on left padding, which changes a text's logits by "
                f"{apart.item():.3g}. Pad on the right."
            )


def _rows(value: Any, row: int, first: int, shape: torch.Size) -> Any:
    """One text of a batch's tensor, from its position `first`."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) != shape[0]:
        return value
    of_row = value[row : row + 1]
    return of_row[:, first:] if value.shape[:2] == shape else of_row
