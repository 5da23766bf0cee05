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
    prediction alone; else the model keeps its own way. Batches with images or other features decide
    for themselves, since these may have positions of their own.

    Parameters
    ----------
    can_pass : bool
        whether the model takes positions, and may be given them
    """

    def __init__(self, can_pass: bool) -> None:
        self._can_pass = can_pass
        self._verdicts: dict[frozenset[str], bool] = {}
        self._for_now: set[frozenset[str]] = set()

    def passes(self, inputs: Any) -> bool:
        """Whether positions are to be passed with such a batch."""
        return self._verdicts.get(_features(inputs), False)

    def is_settled(self, inputs: Any) -> bool:
        """Whether no such batch needs to decide any more."""
        features = _features(inputs)
        return features in self._verdicts and features not in self._for_now

    def is_open(self, inputs: Any) -> bool:
        """Whether this batch must decide: it is the first with left padding but no positions.

        A text of one token, which attends to nothing but itself, decides only for now.
        """
        if self.is_settled(inputs) or not isinstance(inputs, Mapping) or "position_ids" in inputs:
            return False
        mask = inputs.get("attention_mask")
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
            return False
        is_new = _features(inputs) not in self._verdicts
        return bool((_padding(mask) if is_new else _telling(mask)).any())

    def settle(self, inputs: Mapping[str, Any], predict: Predict) -> None:
        """Decide, by three predictions of one text.

        Warns
        -----
        UserWarning
            If the text's prediction depends on its padding anyway, or can't be checked.
        """
        mask, features = inputs["attention_mask"].bool(), _features(inputs)
        telling = _telling(mask)
        self._for_now.discard(features)
        if not telling.any():
            self._for_now.add(features)
        row = int((telling if telling.any() else _padding(mask)).argmax())
        first = int(_padding(mask)[row])
        padded = _text(inputs, row, 0)
        alone = _text(inputs, row, first)
        self._verdicts[features] = False
        try:
            expected = predict(alone, False)
            apart = (predict(padded, False) - expected).abs().max()
            if self._can_pass:
                with_positions = (predict(padded, True) - expected).abs().max()
                self._verdicts[features] = bool(with_positions < apart / 2)
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


def _features(inputs: Any) -> frozenset[str]:
    """Keys of what a batch has beside tokens, such as images."""
    if not isinstance(inputs, Mapping):
        return frozenset()
    tensors = {key: value for key, value in inputs.items() if isinstance(value, torch.Tensor)}
    return frozenset(
        key for key, v in tensors.items() if v.is_floating_point() and "mask" not in key
    )


def _padding(mask: torch.Tensor) -> torch.Tensor:
    """`(B,)` positions before the first token of each text."""
    return mask.int().argmax(-1)


def _telling(mask: torch.Tensor) -> torch.Tensor:
    """`_padding` of the texts of several tokens, 0 for others."""
    return _padding(mask) * (mask.bool().sum(-1) > 1)


def _text(inputs: Mapping[str, Any], row: int, first: int) -> dict[str, Any]:
    """One text of a batch, from its position `first`."""
    shape = inputs["attention_mask"].shape
    text = {}
    for key, value in inputs.items():
        has_rows = isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == shape[0]
        text[key] = value[row : row + 1] if has_rows else value
        if has_rows and value.shape[:2] == shape and not key.startswith("decoder_"):
            text[key] = text[key][:, first:]
    return text
