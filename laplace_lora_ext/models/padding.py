"""Finds out, by trying, how a model numbers the positions of left-padded texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from laplace_lora_ext.messages import warn
from laplace_lora_ext.models.positions import features

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
    for themselves, since these may have positions of their own, and as a whole, since images need
    not lie by text.

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
        return self._verdicts.get(features(inputs), False)

    def is_settled(self, inputs: Any) -> bool:
        """Whether no such batch needs to decide any more."""
        kind = features(inputs)
        return kind in self._verdicts and kind not in self._for_now

    def is_open(self, inputs: Any) -> bool:
        """Whether this batch must decide: it is the first with left padding but no positions.

        A text of one token, which attends to nothing but itself, decides only for now.
        """
        if self.is_settled(inputs) or not isinstance(inputs, Mapping) or "position_ids" in inputs:
            return False
        mask = inputs.get("attention_mask")
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
            return False
        is_new = features(inputs) not in self._verdicts
        return bool((_padding(mask) if is_new else _telling(mask)).any())

    def settle(self, inputs: Mapping[str, Any], predict: Predict) -> None:
        """Decide, by three predictions of one text.

        Warns
        -----
        UserWarning
            If the text's prediction depends on its padding anyway, or can't be checked.
        """
        mask, kind = inputs["attention_mask"].bool(), features(inputs)
        telling = _telling(mask)
        self._for_now.discard(kind)
        if not telling.any():
            self._for_now.add(kind)
        self._verdicts[kind] = False
        alone, padded, row = _wider(inputs) if kind else _of_one_text(inputs)
        try:
            expected = predict(alone, False)[row]
            apart = (predict(padded, False)[row] - expected).abs().max()
            if self._can_pass:
                with_positions = (predict(padded, True)[row] - expected).abs().max()
                self._verdicts[kind] = bool(with_positions < apart / 2)
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


def _padding(mask: torch.Tensor) -> torch.Tensor:
    """`(B,)` positions before the first token of each text."""
    return mask.int().argmax(-1)


def _telling(mask: torch.Tensor) -> torch.Tensor:
    """`_padding` of the texts of several tokens, 0 for others."""
    return _padding(mask) * (mask.bool().sum(-1) > 1)


def _of_one_text(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], int]:
    """A text alone and padded, and its row there: of several tokens, with the most padding."""
    mask = inputs["attention_mask"].bool()
    telling = _telling(mask)
    row = int((telling if telling.any() else _padding(mask)).argmax())
    first = int(_padding(mask)[row])
    shape = mask.shape

    def text(first: int) -> dict[str, Any]:
        of_text = {}
        for key, value in inputs.items():
            has_rows = isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == shape[0]
            of_text[key] = value[row : row + 1] if has_rows else value
            if has_rows and _lies_by_position(key, value, shape):
                of_text[key] = of_text[key][:, first:]
        return of_text

    return text(first), text(0), 0


def _wider(inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any], int]:
    """A batch as it is and with as much padding again, and the row of its longest text."""
    mask = inputs["attention_mask"].bool()
    padding = _padding(mask)
    row, n_more = int(padding.argmax()), int(padding.max())
    wider = dict(inputs)
    for key, value in inputs.items():
        if isinstance(value, torch.Tensor) and _lies_by_position(key, value, mask.shape):
            # What lies at the first position of the text with the most padding is padding.
            more = value[row, :1].expand(len(value), n_more, *value.shape[2:])
            wider[key] = torch.cat([more, value], dim=1)
    return inputs, wider, int(padding.argmin())


def _lies_by_position(key: str, value: torch.Tensor, shape: torch.Size) -> bool:
    return value.shape[:2] == shape and not key.startswith("decoder_")
