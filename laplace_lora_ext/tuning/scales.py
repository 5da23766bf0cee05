"""What a grid search sums over validation data, to choose more than a prior."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from scipy.interpolate import CubicSpline
from scipy.optimize import OptimizeResult, minimize_scalar
from torch import Tensor

from laplace_lora_ext.predictive.data_sets import Columns
from laplace_lora_ext.predictive.distributions import moments_of_model
from laplace_lora_ext.predictive.links import own_links
from laplace_lora_ext.predictive.moments import parts_for
from laplace_lora_ext.tuning.method import (
    HistoryBuilder,
    Predictor,
    TuningHistory,
    check_grid,
)

_QUARTERS = np.arange(-8, 8) / 4
LOGIT_SCALES = np.append(5.0**_QUARTERS, 20.0)
"""Scales of the logits at which losses are summed, from 0.04 to 20; 1 is one of them.

Texts learnt by heart ask for temperatures of 5 to 11 (benchmarks/results/answers.md).
"""

PENALTY = 4.0
"""Times the squared logarithm of a scale above 1: what is added to the summed loss, in
nats.

Chosen by draws of few texts, on tasks that settings are chosen on (docs/tried.md).
"""

_EXACT = 1e-6  # in the logarithm of the scale


class Best(NamedTuple):
    """Holds the lowest loss at one prior precision, and where it is.

    Attributes
    ----------
    objective : float
        a mean over the examples, in nats, with the penalty of the scale
    logit_scale : float, optional
        None where none is chosen
    sigma_noise : float, optional
        None where none is chosen
    penalty : float, default=0.0
        the part of the objective that is no loss
    """

    objective: float
    logit_scale: float | None = None
    sigma_noise: float | None = None
    penalty: float = 0.0


class Score(Protocol):
    """Scores predictions by numbers whose sums over examples tell the best loss.

    Attributes
    ----------
    size : int
        K, how many numbers an example has
    """

    @property
    def size(self) -> int: ...

    def terms(
        self,
        la: Predictor,
        x: Any,
        targets: Tensor,
    ) -> Tensor:
        """Compute each example's numbers `(N, K)` in float64, at the present prior.

        `x` is a batch of inputs, or moments of one.
        """
        ...

    def best(
        self,
        sums: Tensor,
        n_examples: int,
    ) -> Best:
        """Find the best loss at a prior, given the sums `(K,)` of all numbers."""
        ...


@dataclass(frozen=True)
class PriorAlone:
    """Scores predictions as they are, by each example's loss.

    Parameters
    ----------
    predict : callable
        takes the posterior and inputs or moments; returns probabilities, or of numbers
        means and variances
    """

    predict: Callable[[Predictor, Any], Columns]

    @property
    def size(self) -> int:
        return 1

    def terms(
        self,
        la: Predictor,
        x: Any,
        targets: Tensor,
    ) -> Tensor:
        first = la.members[0]
        likelihood = first.trained_likelihood
        predicted = [output.double() for output in self.predict(la, x)]
        if not likelihood.is_gaussian:
            predicted = [predicted[0].log()]
        targets = targets.to(predicted[0].device)
        nll = likelihood.nll(predicted, targets, first.sigma_noise)
        return nll[:, None]

    def best(
        self,
        sums: Tensor,
        n_examples: int,
    ) -> Best:
        return Best(sums.item() / n_examples)


@dataclass(frozen=True)
class WithLogitScale:
    """Scores `link(s f, s² V)` at several scales s, from the same moments.

    An example's numbers are its negative log-likelihoods, one for each of
    `LOGIT_SCALES`. Without a variance, s is the inverse of a temperature, and s = 1 is
    the prior alone: what is best of all priors and scales is no worse than either.

    Few examples say little of s: thirty that are all right would ask for a very large
    one. So `scale_penalty` is added to the summed loss, which holds large scales back.
    Small ones are free: models that have learnt their examples by heart are too sure,
    as a rule, and to be less sure of a few examples does little harm. So where a search
    ends without a variance, what it has chosen is the temperature itself.

    Parameters
    ----------
    link_approx : {"mean_field", "probit", "mc"}
    n_samples : int
        draws of "mc"
    seed : int
        of the draws, which are the same for all priors and scales
    """

    link_approx: str
    n_samples: int
    seed: int

    @property
    def size(self) -> int:
        return len(LOGIT_SCALES)

    def terms(
        self,
        la: Predictor,
        x: Any,
        targets: Tensor,
    ) -> Tensor:
        first = la.members[0]
        likelihood = first.trained_likelihood
        noise = torch.Generator()
        link = own_links(self.n_samples, noise)[self.link_approx]
        parts = zip(la.members, parts_for(la.members, x), strict=True)
        moments = [
            moments_of_model(member, part, self.link_approx) for member, part in parts
        ]
        targets = targets.to(moments[0].f_mu.device)
        columns = []
        for scale in LOGIT_SCALES:
            la.logit_scale = float(scale)
            log_p = []
            for member, of_member in zip(la.members, moments, strict=True):
                # The same draws for each scale, so that the loss is smooth in it.
                noise.manual_seed(self.seed)
                scaled = of_member.scaled(member.logit_scale)
                with torch.autocast(scaled.f_mu.device.type, enabled=False):
                    log_p.append(link(scaled).double())
            total = torch.stack(log_p).logsumexp(0)
            of_mean = total - math.log(len(log_p))
            columns.append(likelihood.nll([of_mean], targets, first.sigma_noise))
        return torch.stack(columns, dim=1)

    def best(
        self,
        sums: Tensor,
        n_examples: int,
    ) -> Best:
        """Find the best scale, also between those at which the losses are known."""
        logs = np.log(LOGIT_SCALES)
        last = len(logs) - 1
        losses = sums.cpu().numpy()
        objectives = losses + scale_penalty(logs)
        middle = int(objectives.argmin())
        objective = float(objectives[middle])
        log_scale = float(logs[middle])
        if np.isfinite(losses).all():
            # The loss is smooth in log s. Between two scales a spline is exact to 1e-4,
            # or to 1e-3 at its ends and where logits are tens apart. A polynomial
            # through more of them is not.
            spline = CubicSpline(logs, losses)
            search = minimize_scalar(
                lambda log_scale: spline(log_scale) + scale_penalty(log_scale),
                bounds=(logs[max(middle - 1, 0)], logs[min(middle + 1, last)]),
                options={"xatol": _EXACT},
            )
            between = cast(OptimizeResult, search)
            if between.fun < objective:
                objective = float(between.fun)
                log_scale = float(between.x)
        return Best(
            objective / n_examples,
            logit_scale=math.exp(log_scale),
            penalty=float(scale_penalty(log_scale)) / n_examples,
        )


def scale_penalty(log_scale: np.ndarray | float) -> np.ndarray:
    """Compute what a scale adds to a summed loss, in nats, from its logarithm."""
    return PENALTY * np.square(np.maximum(log_scale, 0))


@dataclass(frozen=True)
class WithNoise:
    """Scores numbers by their density, at the noise that suits them best.

    The grid is of ρ = λ σ², with prior precision λ and noise σ, and the posterior has a
    noise of 1 meanwhile. Then the covariance of an example's outputs is σ² V with a V
    that σ is not in, and with residuals r its negative log-likelihood is

        ½ log det(2π σ² (I + V)) + ½ rᵀ (I + V)⁻¹ r / σ²

    An example's numbers are `rᵀ (I + V)⁻¹ r` and `log det(I + V)`. The best σ² is the
    mean of the first, for each output.

    Parameters
    ----------
    n_outputs : int
    """

    n_outputs: int

    @property
    def size(self) -> int:
        return 2

    def terms(
        self,
        la: Predictor,
        x: Any,
        targets: Tensor,
    ) -> Tensor:
        first = la.members[0]
        f_mu, f_var = moments_of_model(first, x, "probit")
        residuals = targets.to(f_mu.device).double() - f_mu.double()
        V = f_var.double()
        identity = torch.eye(self.n_outputs).to(V)
        root = torch.linalg.cholesky(identity + V)
        whitened = torch.linalg.solve_triangular(
            root, residuals[..., None], upper=False
        )
        squares = whitened.square().sum((-2, -1))
        diagonal = root.diagonal(dim1=-2, dim2=-1)
        log_det = 2 * diagonal.log().sum(-1)
        return torch.stack([squares, log_det], dim=1)

    def best(
        self,
        sums: Tensor,
        n_examples: int,
    ) -> Best:
        squares, log_dets = sums.tolist()
        n_numbers = n_examples * self.n_outputs
        variance = squares / n_numbers
        if variance == 0:
            raise ValueError(
                "The validation targets are predicted without any error, which leaves "
                "no noise to choose: check that they are not the model's own, or pass "
                "optimize_scale=False."
            )
        # At the best variance the squares over it are one for each number.
        of_noise = n_numbers * (math.log(2 * math.pi * variance) + 1)
        nll = (of_noise + log_dets) / 2
        return Best(nll / n_examples, sigma_noise=math.sqrt(variance))


@dataclass(frozen=True, eq=False)
class GridLosses:
    """Holds a score's sums over examples at every prior precision of a grid.

    Attributes
    ----------
    grid : torch.Tensor
        `(T,)` or `(T, blocks)` prior precisions; if a noise is chosen too, for a noise
        of 1
    sums : torch.Tensor
        `(T, K)`, float64
    n_examples : int
    score : Score
    """

    grid: Tensor
    sums: Tensor
    n_examples: int
    score: Score
    unit: float = 1.0  # that the grid is in

    def __add__(self, other: GridLosses) -> GridLosses:
        """Add what other examples say of the same prior precisions."""
        return replace(
            self,
            sums=self.sums + other.sums,
            n_examples=self.n_examples + other.n_examples,
        )

    def choose(self, la: Predictor) -> GridHistory:
        """Give a posterior the best prior precision, with the scale that suits it."""
        history = GridHistory.of(self)
        best = int(history.objective.argmin())
        if history.sigma_noise is not None:
            for member in la.members:
                member.sigma_noise = history.sigma_noise[best].item()
        la.prior_precision = history.prior_precision[best]
        if history.logit_scale is not None:
            la.logit_scale = history.logit_scale[best].item()
        return history


@dataclass(frozen=True, repr=False, kw_only=True)
class GridHistory(TuningHistory):
    """Adds to a history the sums that it was made of.

    Attributes
    ----------
    penalty : torch.Tensor
        `(T,)`, float64: the part of the objective that is no loss
    losses : GridLosses
    """

    penalty: Tensor
    losses: GridLosses

    @classmethod
    def of(cls, losses: GridLosses) -> GridHistory:
        """Find the best loss at every point; one that is not a number is refused."""
        builder = HistoryBuilder()
        bests = [losses.score.best(sums, losses.n_examples) for sums in losses.sums]
        for index, best in enumerate(bests):
            prior_precision = losses.grid[index]
            if best.sigma_noise is not None:
                # From ρ = λ σ², which the grid is of, to λ.
                prior_precision = losses.unit * prior_precision / best.sigma_noise**2
            builder.add(index, best.objective, prior_precision)
        history = builder.history()
        check_grid(history)
        penalties = [best.penalty for best in bests]
        return cls(
            step=history.step,
            objective=history.objective,
            prior_precision=history.prior_precision,
            logit_scale=_chosen([best.logit_scale for best in bests]),
            sigma_noise=_chosen([best.sigma_noise for best in bests]),
            penalty=torch.tensor(penalties, dtype=torch.float64),
            losses=losses,
        )


def _chosen(numbers: Sequence[float | None]) -> Tensor | None:
    """Gather what was chosen at every point of a grid; None where that was nothing."""
    if any(number is None for number in numbers):
        return None
    return torch.tensor(numbers, dtype=torch.float64)
