"""What methods to choose a prior share: options, starts, and results."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace_lora_ext.curvature.decomposed import trace_of
from laplace_lora_ext.messages import check_name
from laplace_lora_ext.models.running import as_tensor, cpu_as_default, normal_tensors
from laplace_lora_ext.predicting import Predictor
from laplace_lora_ext.predictive.moments import draw_seed
from laplace_lora_ext.predictive.posterior import Hyperparameters, Posterior
from laplace_lora_ext.predictive.statistics import (
    PredictiveStatistics,
    has_statistics,
    of_present_fit,
)
from laplace_lora_ext.processes import of_first, together

_STRUCTURES = ["scalar", "kind", "layerwise", "diag"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial(Hyperparameters):
    """Hyperparameters that a search has tried, and how good they are.

    Attributes
    ----------
    objective : float
        what the search compares, such as the loss or the log marginal likelihood
    loss : float, optional
        the mean loss at these hyperparameters, where the objective is no loss
    """

    objective: float
    loss: float | None = None

    def __post_init__(self) -> None:
        # On the CPU, so that a history to plot holds no memory of an accelerator.
        prior = self.prior_precision.detach().flatten().cpu()
        object.__setattr__(self, "prior_precision", prior)


@dataclass(frozen=True, repr=False, eq=False)
class TuningHistory:
    """What a search for a prior precision tried, ready to plot.

    Attributes
    ----------
    trials : sequence of Trial
        T of them, in order
    choice : int
        which of them is chosen
    posteriors : tuple of LoRALaplace
        those that the method has fitted to other trainings

    Raises
    ------
    ValueError
        If an objective is not a number.
    """

    trials: Sequence[Trial]
    choice: int
    posteriors: tuple[Posterior, ...] = ()

    def __post_init__(self) -> None:
        for trial in self.trials:
            if trial.objective != trial.objective:
                low, high = (each.item() for each in trial.prior_precision.aminmax())
                raise ValueError(
                    "The objective is not a number at prior precisions from "
                    f"{low:.3g} to {high:.3g}."
                )

    @classmethod
    def of_losses(cls, trials: Sequence[Trial]) -> TuningHistory:
        """Make the history of a search that chooses the lowest objective."""
        losses = [trial.objective for trial in trials]
        return cls(trials, losses.index(min(losses)))

    def __repr__(self) -> str:
        """Say in a line what is chosen, among how many."""
        prior = self.chosen.prior_precision.log().mean().exp().item()
        return (
            f"TuningHistory({len(self.trials)} trials; chosen: prior precision "
            f"{prior:.4g}, loss {self.loss:.4g})"
        )

    @property
    def chosen(self) -> Trial:
        """Return what the search has chosen."""
        return self.trials[self.choice]

    @property
    def loss(self) -> float:
        """Return the mean loss at what is chosen, or else the objective there."""
        chosen = self.chosen
        return chosen.objective if chosen.loss is None else chosen.loss

    @property
    def objective(self) -> Tensor:
        """Return each trial's objective, `(T,)`, float64."""
        return self._column("objective")

    @property
    def prior_precision(self) -> Tensor:
        """Return the priors tried: `(T, 1)`, `(T, blocks)` or `(T, parameters)`."""
        return torch.stack([trial.prior_precision for trial in self.trials])

    @property
    def logit_scale(self) -> Tensor:
        """Return the best scale of the logits at each prior precision, `(T,)`."""
        return self._column("logit_scale")

    @property
    def sigma_noise(self) -> Tensor | None:
        """Return each trial's noise `(T,)`; None where the method chooses none."""
        return None if self.chosen.sigma_noise is None else self._column("sigma_noise")

    def _column(self, name: str) -> Tensor:
        values = [getattr(trial, name) for trial in self.trials]
        return torch.tensor(values, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class TuningMethod:
    """A method to choose the prior: its fields are options; call it to choose.

    A call takes a posterior, or a mixture where the method suits one, and sets all
    hyperparameters at once in the end. So what it chooses does not depend on what
    earlier searches have chosen: `logit_scale` is 1 unless the method chooses it, and
    `sigma_noise` alone stays as it is where no noise is chosen.

    Parameters
    ----------
    init_prior_prec : float or torch.Tensor, default=1.0
        where the search starts. Several numbers also determine the structure
    prior_structure : {"scalar", "kind", "layerwise", "diag"}, optional
        one prior precision, one for each kind of weight (LoRA, heads, others), one for
        each block, or, with "diag" or "full" curvature, one for each weight. By default
        "kind" where there are several kinds, as heads want a much smaller one than LoRA
        weights, and otherwise "scalar"
    progress_bar : bool, default=False
        whether to show one
    """

    init_prior_prec: float | Tensor = 1.0
    prior_structure: str | None = None
    progress_bar: bool = False

    def __post_init__(self) -> None:
        if self.prior_structure is not None:
            check_name("prior_structure", self.prior_structure, _STRUCTURES)

    def __call__(self, la: Predictor) -> TuningHistory:
        """Choose the hyperparameters of a posterior, and set them."""
        history = self.choose(la)
        la.hyperparameters = history.chosen
        return history

    @normal_tensors
    @torch.enable_grad()
    def choose(self, la: Predictor) -> TuningHistory:
        """Choose without setting anything: `la` stays as it is."""
        with together(), cpu_as_default():
            # What a search tries, it sets on a copy.
            tried = copy(la)
            tried.prior_precision = 1.0
            tried.logit_scale = 1.0
            history = self._search(tried)
            # Ranks may differ in the last digit, and must not drift apart.
            told = of_first(replace(history, posteriors=()))
            return replace(told, posteriors=history.posteriors)

    def _search(self, la: Predictor) -> TuningHistory:
        """Choose for a copy of a posterior, whose attributes may change."""
        raise NotImplementedError

    @property
    def _is_base(self) -> bool:
        """Tell whether the user gave several numbers to start from."""
        return as_tensor(self.init_prior_prec).numel() > 1

    def _kinds(self, la: Predictor) -> Tensor | None:
        """Number each block's kind, `(blocks,)`, if each kind gets its own prior."""
        if len(la.members) > 1:  # a mixture has a common factor alone
            return None
        names = [block.kind for block in la.members[0].blocks]
        in_order = list(dict.fromkeys(names))
        by_default = self.prior_structure is None and not self._is_base
        if self.prior_structure == "kind" or (by_default and len(in_order) > 1):
            return torch.tensor([in_order.index(name) for name in names])
        return None

    def _start(self, la: Predictor) -> Tensor:
        """Set the prior to the search's start; return it in float64.

        Its shape is `(1,)`, `(blocks,)` or `(parameters,)`.
        """
        first = la.members[0]
        start = as_tensor(self.init_prior_prec).detach()
        # Several numbers are of the structure that they have.
        if start.numel() == 1 and self.prior_structure == "layerwise":
            start = start.expand(len(first.blocks))
        elif start.numel() == 1 and self.prior_structure == "diag":
            start = start.expand(first.n_params)
        # Raises if it is not above 0, or the curvature lacks this structure.
        la.prior_precision = start
        return la.prior_precision.detach().double()


def n_kinds_of(kinds: Tensor) -> int:
    """Count the different numbers of kinds, which begin at 0."""
    return int(kinds.max()) + 1


def mean_squared_slope(la: Posterior) -> float:
    """Return tr(H) / (N C); 1 for 0. Of a regression it is a mean squared slope."""
    with torch.autocast(la.model.device.type, enabled=False):
        return trace_of(la.H) / (la.n_data * la.n_outputs) or 1.0


def unit_of_priors(la: Posterior) -> float:
    """Return tr(H) / (N C), over the temperature that divides the curvature.

    Under this prior precision an output of a regression varies by 1. Multiplied by 1 /
    sigma_noise² it is the same prior whatever unit the targets have.
    """
    # Ranks may differ in the last digit.
    return of_first(mean_squared_slope(la) / float(la.temperature))


def statistics_of_classes(
    la: Posterior, data: Any, link_approx: str, progress_bar: bool
) -> PredictiveStatistics:
    """Compute statistics for a link, or take given ones of the present fit.

    A `NotImplementedError` for numbers, and for structures without statistics.
    """
    if la.task.has_noise or not has_statistics(la):
        raise NotImplementedError(
            'This method needs classes, and hessian_structure="lowrank_kron": let '
            'held-out data choose, by method="gridsearch".'
        )
    if isinstance(data, PredictiveStatistics):
        return of_present_fit(la, data, link_approx)
    return la.predictive_statistics(data, progress_bar, link_approx=link_approx)


def seed_of_search(generator: torch.Generator | None) -> int:
    """Draw the seed of a search; without a generator every call gets the same."""
    return 0 if generator is None else draw_seed(generator)
