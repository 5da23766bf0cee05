"""What a search for a prior precision tried, and how far it may go."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

# Of the logarithm of a prior precision.
REACH = (math.log(torch.finfo(torch.float32).tiny), math.log(torch.finfo(torch.float32).max))
_LONGEST_ROW = 10_000  # of more prior precisions, a history keeps the last step's only


@dataclass(frozen=True)
class TuningHistory:
    """What a search for a prior precision tried, ready to plot.

    Attributes
    ----------
    step : torch.Tensor
        `(T,)` number of the step, or of the point of a grid
    objective : torch.Tensor
        `(T,)`, float64: the loss, or the log marginal likelihood
    prior_precision : torch.Tensor
        `(T, 1)` or `(T, blocks)`, where the objective was evaluated; for a diagonal prior of more
        than 10,000 weights `(1, parameters)`, only that of the last step
    n_examples : int or None
        how many examples the objective averages, if the method chose them
    posteriors : tuple of LoRALaplace
        those that the method has fitted to other trainings
    """

    step: torch.Tensor
    objective: torch.Tensor
    prior_precision: torch.Tensor
    n_examples: int | None = None
    posteriors: tuple[Any, ...] = ()


class Recorder:
    """Gathers a history."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self.objectives: list[float] = []
        self._rows: list[torch.Tensor] = []

    def add(self, step: int, objective: float, prior_precision: torch.Tensor) -> None:
        """Record a step; an objective that is not a number is refused."""
        row = prior_precision.detach().flatten().cpu()
        if math.isnan(objective):
            span = f"from {row.min().item():.3g} to {row.max().item():.3g}"
            raise ValueError(f"The objective is not a number at prior precisions {span}.")
        if row.numel() > _LONGEST_ROW:
            self._rows.clear()
        self._steps.append(step)
        self.objectives.append(objective)
        self._rows.append(row)

    def history(self, n_examples: int | None = None) -> TuningHistory:
        return TuningHistory(
            torch.tensor(self._steps),
            torch.tensor(self.objectives, dtype=torch.float64),
            torch.stack(self._rows),
            n_examples,
        )
