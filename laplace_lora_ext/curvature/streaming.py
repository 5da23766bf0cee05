"""Collects rows, to update many large factors at once."""

from __future__ import annotations

from math import isfinite

import torch

from laplace_lora_ext.curvature.factors import DenseFactor, Factor, LowRankFactor, add_rows
from laplace_lora_ext.numerics import read


class StreamingUpdates:
    """Adds rows to Kronecker factors, updating many large factors at once.

    Updating a large factor takes a dozen operations on small matrices, and time goes by their
    number rather than their size. So rows wait until there are `limit` bytes of them.

    Rows that are not finite make a factor's trace so, and are not added: an eigendecomposition
    would fail on them. Who adds rows looks at the traces, once a batch: a look at a number on an
    accelerator waits for all work there.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[LowRankFactor, list[torch.Tensor]] = {}
        self._bytes = 0

    def add(self, factor: Factor, rows: torch.Tensor) -> torch.Tensor:
        """Add `rowsᵀ rows` to a factor, now or at the next `finish`, and return its trace."""
        if isinstance(factor, DenseFactor):
            return factor.update(rows)
        energy = factor.add_energy(rows)
        self._waiting.setdefault(factor, []).append(rows)
        self._bytes += rows.nbytes
        if self._bytes >= self._limit:
            self.finish()
        return energy

    def finish(self) -> None:
        """Add all waiting rows."""
        waiting, self._waiting, self._bytes = self._waiting, {}, 0
        if all(map(isfinite, read([factor.trace for factor in waiting]))):
            add_rows(waiting)
