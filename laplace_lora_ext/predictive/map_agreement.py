"""How often predictions prefer the same class as the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from laplace_lora_ext.messages import warn

_ENOUGH_ROWS = 100
# In `python -m benchmarks calibration`, up to 8 % cost half a point of accuracy on average, and 8
# to 15 % one to three points.
_TOLERATED = 0.08


class MapAgreement:
    """Counts predictions that prefer another class than the mean of the logits.

    This happens with a broad posterior over many classes: the mean of the softmax then need not be
    largest where the mean of the logits is. Warns once, when more than 8 % of at least 100
    predictions differ.
    """

    def __init__(self) -> None:
        self._rows = self._away = 0
        self._counts = True
        self._classes = torch.empty(0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Don't count predictions while prior precisions are only being tried."""
        before, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = before

    def expect(self, f_mu: torch.Tensor) -> None:
        """Remember the most probable classes of `(B, C)` logits until `add`."""
        self._classes = f_mu.argmax(-1)

    def add(self, probabilities: torch.Tensor, link_approx: str) -> None:
        """Compare `(B, C)` probabilities with the expected classes.

        Warns
        -----
        UserWarning
            If more than 8 % of all predictions differ.
        """
        if not self._counts:
            return
        self._rows += len(probabilities)
        self._away += int((self._classes != probabilities.argmax(-1)).sum())
        if self._rows < _ENOUGH_ROWS or self._away <= _TOLERATED * self._rows:
            return
        self._counts = False
        better = "mean_field"
        link = "" if link_approx == better else f'link_approx="{better}" may agree more often; '
        warn(
            f"{self._away} of {self._rows} predictions prefer another class than the model itself, "
            f"which costs accuracy: the posterior is broad. {link}a larger prior_precision narrows "
            'it. Let optimize_prior_precision choose one, with method="agreement" on the training '
            'data or "gridsearch" on validation data.'
        )
