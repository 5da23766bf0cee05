"""Collects rows, to update many large factors at once."""

from __future__ import annotations

import torch

from laplace_lora_ext.curvature.factors import DenseFactor, Factor, LowRankFactor, add_rows


class StreamingUpdates:
    """Adds rows to Kronecker factors, updating many large factors at once.

    Updating a large factor takes a dozen operations on small matrices, and time goes by their
    number rather than their size. So rows wait until there are `limit` bytes of them.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[LowRankFactor, list[torch.Tensor]] = {}
        self._bytes = 0

    def add(self, factor: Factor, rows: torch.Tensor) -> torch.Tensor:
        """Add `rowsᵀ rows` to a factor, now or at the next `finish`, and return its trace.

        Rows that are not finite are refused.
        """
        if isinstance(factor, DenseFactor):
            return factor.update(rows)
        energy = factor.add_energy(rows)
        self._waiting.setdefault(factor, []).append(rows)
        self._bytes += rows.nbytes
        if self._bytes >= self._limit:
            add_rows(self._taken())
        return energy

    def finish(self) -> None:
        """Add all waiting rows."""
        add_rows(self._taken())

    def _taken(self) -> dict[LowRankFactor, list[torch.Tensor]]:
        waiting, self._waiting, self._bytes = self._waiting, {}, 0
        return waiting
