"""What a search tried, and which of it is chosen: one table for all methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace_lora_ext.predictive.data_sets import NO_DATA
from laplace_lora_ext.tuning.scales import Outcome, Score


@dataclass(frozen=True, eq=False)
class Hyperparameters:
    """What a search sets, all at once, named as the attributes of a posterior.

    Attributes
    ----------
    prior_precision : torch.Tensor
        of a mixture, a factor of its members'
    logit_scale : float, default=1.0
        of a mixture, a factor of its members'
    sigma_noise : torch.Tensor or float, optional
        None leaves it as it is
    temperature : torch.Tensor or float, optional
        None leaves it as it is
    """

    prior_precision: Tensor
    logit_scale: float = 1.0
    sigma_noise: Tensor | float | None = None
    temperature: Tensor | float | None = None


@dataclass(frozen=True, repr=False, eq=False)
class TuningHistory:
    """What a search for a prior precision tried, ready to plot.

    Attributes
    ----------
    step : torch.Tensor
        `(T,)` number of the step, or of the point of a grid
    objective : torch.Tensor
        `(T,)`, float64: the loss, with the penalty of the scale, or the log marginal
        likelihood
    prior_precision : torch.Tensor
        `(T, 1)`, `(T, blocks)` or `(T, parameters)`, where the objective was evaluated
    penalty : torch.Tensor
        `(T,)`, float64: the part of the objective that is no loss
    logit_scale : torch.Tensor, optional
        `(T,)`, float64: the best scale of the logits at each prior precision; None
        where the method chooses none, which leaves 1
    sigma_noise : torch.Tensor, optional
        `(T,)`, float64: the noise of a regression at each prior precision; None where
        the method chooses none, which leaves it as it is
    choice : int
        which of the T is chosen
    losses : GridLosses, optional
        of a grid: the sums that the objectives were made of
    posteriors : tuple of LoRALaplace
        those that the method has fitted to other trainings
    """

    step: Tensor
    objective: Tensor
    prior_precision: Tensor
    penalty: Tensor
    logit_scale: Tensor | None
    sigma_noise: Tensor | None
    choice: int
    losses: GridLosses | None = None
    posteriors: tuple[Any, ...] = ()

    @classmethod
    def of(
        cls,
        prior_precisions: Sequence[Tensor],
        outcomes: Sequence[Outcome],
        choice: int | None = None,
    ) -> TuningHistory:
        """Put outcomes into a table.

        Parameters
        ----------
        prior_precisions : sequence of torch.Tensor
            one for each step
        outcomes : sequence of Outcome
            of the steps
        choice : int, optional
            which of them is chosen; the lowest objective if omitted

        Returns
        -------
        TuningHistory

        Raises
        ------
        ValueError
            If an objective is not a number.
        """
        # On the CPU, so that a history to plot holds no memory of an accelerator.
        rows = [prior.detach().flatten().cpu() for prior in prior_precisions]
        for row, outcome in zip(rows, outcomes, strict=True):
            if outcome.objective != outcome.objective:
                span = f"from {row.min().item():.3g} to {row.max().item():.3g}"
                raise ValueError(
                    f"The objective is not a number at prior precisions {span}."
                )
        objective = _column([each.objective for each in outcomes])
        return cls(
            step=torch.arange(len(rows)),
            objective=objective,
            prior_precision=torch.stack(rows),
            penalty=_column([each.penalty for each in outcomes]),
            logit_scale=_chosen([each.logit_scale for each in outcomes]),
            sigma_noise=_chosen([each.sigma_noise for each in outcomes]),
            choice=int(objective.argmin()) if choice is None else choice,
        )

    @property
    def chosen(self) -> Hyperparameters:
        """Collect what the search has chosen."""
        scale, noise = self.logit_scale, self.sigma_noise
        return Hyperparameters(
            prior_precision=self.prior_precision[self.choice],
            logit_scale=1.0 if scale is None else scale[self.choice].item(),
            sigma_noise=None if noise is None else noise[self.choice].item(),
        )

    @property
    def loss(self) -> float:
        """Return the objective of what is chosen, without the penalty."""
        return (self.objective - self.penalty)[self.choice].item()

    def __repr__(self) -> str:
        low, high = (value.item() for value in self.prior_precision.aminmax())
        return (
            f"TuningHistory({len(self.step)} prior precisions from {low:.3g} "
            f"to {high:.3g})"
        )


@dataclass(frozen=True, eq=False)
class GridLosses:
    """Holds a score's sums over examples at every prior precision of a grid.

    Attributes
    ----------
    grid : torch.Tensor
        `(T,)` or `(T, blocks)` prior precisions; where a noise is chosen too, for a
        noise of 1, and relative to the unit
    sums : torch.Tensor
        `(T, K)`, float64
    n_examples : int
    score : Score
    unit : float, default=1.0
    """

    grid: Tensor
    sums: Tensor
    n_examples: int
    score: Score
    unit: float = 1.0

    def __add__(self, other: GridLosses) -> GridLosses:
        """Add what other examples say of the same prior precisions."""
        return replace(
            self,
            sums=self.sums + other.sums,
            n_examples=self.n_examples + other.n_examples,
        )

    def history(self) -> TuningHistory:
        """Choose the best point.

        A `ValueError` if there are no examples, or the losses are never finite.
        """
        if not self.n_examples:
            raise ValueError(NO_DATA)
        outcomes = [self.score.best(sums, self.n_examples) for sums in self.sums]
        prior_precisions: list[Tensor] = []
        for point, outcome in zip(self.grid, outcomes, strict=True):
            noise = outcome.sigma_noise
            # From ρ = λ σ², which the grid is of, to λ.
            of_point = point if noise is None else self.unit * point / noise**2
            prior_precisions.append(of_point)
        history = TuningHistory.of(prior_precisions, outcomes)
        if not history.objective.isfinite().any():
            raise ValueError(
                "The validation loss is finite nowhere on the grid: check it."
            )
        return replace(history, losses=self)


def _column(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _chosen(numbers: Sequence[float | None]) -> Tensor | None:
    """Gather what was chosen at every point; None where that was nothing."""
    known = [number for number in numbers if number is not None]
    return _column(known) if len(known) == len(numbers) else None
