"""The orders in which a layer may see the rows of examples, and how to sort them by example."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from laplace_lora_ext.models.positions import Positions
from laplace_lora_ext.passes.ownership import NOBODY


class Layout(ABC):
    """Where a call of a layer has the rows of each example."""

    @abstractmethod
    def arrange(self, rows: torch.Tensor, positions: Positions, n_leading: int = 0) -> torch.Tensor:
        """Rows `(..., d)` as `(B, positions, d)`; the first `n_leading` dimensions stay."""

    def valid(self, n_positions: int, positions: Positions) -> torch.Tensor | None:
        """`(B, n_positions)` mask of the arranged rows; None where all are valid.

        A `NotImplementedError` if the batch's mask can't be applied to them.
        """
        return positions.valid(n_positions)


class FixedLayout(Layout):
    """A layout that, once proven, follows from the sizes of a batch."""

    @abstractmethod
    def allows(self, shape: torch.Size, positions: Positions) -> bool:
        """Whether rows of a `shape`, d left out, can have this layout."""

    def explains(self, owners: torch.Tensor, shape: torch.Size, positions: Positions) -> bool:
        """Whether rows of a `shape` have this layout; `owners` are the examples they belong to."""
        if not self.allows(shape, positions):
            return False
        rows = torch.arange(len(owners), device=owners.device).reshape(*shape, 1)
        found = owners[self.arrange(rows, positions)[..., 0]]
        expected = torch.arange(positions.n_examples, device=owners.device)[:, None]
        return bool(((found == expected) | (found == NOBODY)).all())


@dataclass(frozen=True)
class ExamplesFirst(FixedLayout):
    """`(B, ...)`, `(B T,)`, or `(B k, ...)` with k windows, frames or images an example."""

    def allows(self, shape: torch.Size, positions: Positions) -> bool:
        return len(shape) > 0 and shape[0] % positions.n_examples == 0

    def arrange(self, rows: torch.Tensor, positions: Positions, n_leading: int = 0) -> torch.Tensor:
        return rows.reshape(*rows.shape[:n_leading], positions.n_examples, -1, rows.shape[-1])


@dataclass(frozen=True)
class PositionsFirst(FixedLayout):
    """`(T, B, ...)`, or `(T B,)`."""

    def allows(self, shape: torch.Size, positions: Positions) -> bool:
        if len(shape) == 1:
            return shape[0] == positions.n_tokens
        if len(shape) < 2 or shape[1] % positions.n_examples:
            return False
        return shape[1] in (positions.n_examples, positions.n_rows)

    def arrange(self, rows: torch.Tensor, positions: Positions, n_leading: int = 0) -> torch.Tensor:
        if rows.ndim == n_leading + 2:
            rows = rows.unflatten(n_leading, (-1, positions.n_rows))
        rows = rows.transpose(n_leading, n_leading + 1)
        return rows.reshape(*rows.shape[:n_leading], positions.n_examples, -1, rows.shape[-1])


@dataclass(frozen=True)
class Scattered(Layout):
    """Rows in any order, such as a router picks; `owners`, `(R,)`, are their examples.

    Examples with fewer rows than others are filled up with rows of 0.
    """

    owners: torch.Tensor

    def arrange(self, rows: torch.Tensor, positions: Positions, n_leading: int = 0) -> torch.Tensor:
        flat = rows.reshape(*rows.shape[:n_leading], -1, rows.shape[-1])
        # One row of 0 behind all others, which fills up.
        flat = torch.cat([flat, torch.zeros_like(flat.narrow(n_leading, 0, 1))], dim=n_leading)
        of_each = [
            (self.owners == example).nonzero().flatten() for example in range(positions.n_examples)
        ]
        index = pad_sequence(of_each, batch_first=True, padding_value=len(self.owners))
        picked = flat.index_select(n_leading, index.flatten().to(flat.device))
        return picked.unflatten(n_leading, tuple(index.shape))

    def valid(self, n_positions: int, positions: Positions) -> torch.Tensor | None:
        raise NotImplementedError(
            'its rows are in no fixed order: use kfac_approx="gradient", which needs none'
        )


@dataclass(frozen=True)
class Together(Layout):
    """All rows belong to the only example, or to the one that is back-propagated."""

    def arrange(self, rows: torch.Tensor, positions: Positions, n_leading: int = 0) -> torch.Tensor:
        return rows.reshape(*rows.shape[:n_leading], 1, -1, rows.shape[-1])


@dataclass(frozen=True)
class OneAtATime(Together):
    """Examples that share rows of `layer` are back-propagated one at a time; every row counts."""

    layer: str

    def valid(self, n_positions: int, positions: Positions) -> torch.Tensor | None:
        raise NotImplementedError(
            f"rows of {self.layer} belong to several examples, as embeddings of relative positions "
            'do: use kfac_approx="gradient", or leave this layer out with target_modules'
        )
