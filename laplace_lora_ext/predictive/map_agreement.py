"""How often predictions have the most probable class of the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from laplace_lora_ext.messages import warn

_ENOUGH_ROWS = 100
# On the tasks of `python -m benchmarks calibration`, up to 8 % have cost half a point of accuracy
# on average, and 8 to 15 % one to three points.
_TOLERATED = 0.08


class MapAgreement:
    """Counts predictions whose most probable class is not that of the logits' mean.

    A broad posterior over many classes does that: the mean of the softmax is then no longer
    largest where the mean of the logits is. Warns once, when it has happened to more than 8 % of
    at least 100 predictions.
    """

    def __init__(self) -> None:
        self._rows = self._away = 0
        self._counts = True
        self._classes = torch.empty(0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing: predictions are made under prior precisions that are only tried."""
        before, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = before

    def expect(self, f_mu: torch.Tensor) -> None:
        """Remember the most probable classes of `(B, C)` logits until `add`."""
        self._classes = f_mu.argmax(-1)

    def add(self, probabilities: torch.Tensor, link_approx: str) -> None:
        """Compare `(B, C)` probabilities with what was expected.

        Warns
        -----
        UserWarning
            If more than a few per cent of all predictions disagree.
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
            f"{self._away} of {self._rows} predictions have another most probable class than the "
            f"model itself, which costs accuracy: the posterior is broad. {link}a larger "
            "prior_precision narrows it, such as one that optimize_prior_precision chooses by "
            'method="agreement" on the training data, or by "gridsearch" on others.'
        )
