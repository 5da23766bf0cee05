"""What a grid search sums over validation data, and what it reads off the sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from scipy.interpolate import CubicSpline
from scipy.optimize import OptimizeResult, minimize_scalar
from torch import Tensor

from laplace_lora_ext.predictive.data_sets import NO_DATA
from laplace_lora_ext.predictive.links import log_probabilities
from laplace_lora_ext.predictive.moments import Moments, mix_moments
from laplace_lora_ext.predictive.posterior import Posterior, moments_of_model
from laplace_lora_ext.tuning.method import Trial, TuningHistory

_QUARTERS = np.arange(-8, 8) / 4
LOGIT_SCALES = (*(5.0**_QUARTERS).tolist(), 20.0)
"""Scales of the logits at which losses are summed, from 0.04 to 20; 1 is one of them.

Texts learnt by heart ask for temperatures of 5 to 11 (benchmarks/results/answers.md).
"""

PENALTY = 4.0
"""Times the squared logarithm of a scale above 1: what is added to the summed loss, in
nats.

Chosen by draws of few texts, on tasks that settings are chosen on (docs/tried.md).
"""

A_NAT = 1.0
"""What all examples together must gain, in nats, for a posterior without variance."""

_EXACT = 1e-6  # in the logarithm of the scale
_SEED = 0  # of draws, which are the same for all examples, priors and scales


@dataclass(frozen=True)
class Likelihoods:
    """Scores predictions by their likelihood: classes at several scales, or numbers.

    An example's numbers are its negative log-likelihoods, one for each scale s of
    `link(s f, s² V)`. Without a variance, s is the inverse of a temperature, and s = 1
    is the prior alone: what is best of all priors and scales is no worse than either.
    Numbers have no scale, but the noise of the first member.

    Few examples say little of s: thirty that are all right would ask for a very large
    one. So `scale_penalty` is added to the summed loss, which holds large scales back.
    Small ones are free: models that have learnt their examples by heart are too sure,
    as a rule, and to be less sure of a few examples does little harm. So where a search
    ends without a variance, what it has chosen is the temperature itself.

    Parameters
    ----------
    link_approx : str
    n_samples : int
        draws of "mc"
    scales : tuple of float, default=(1.0,)
        S scales, `LOGIT_SCALES` where one is to be chosen
    """

    link_approx: str
    n_samples: int
    scales: tuple[float, ...] = (1.0,)

    def terms(
        self, members: Sequence[Posterior], moments: Sequence[Moments], targets: Tensor
    ) -> Tensor:
        """Compute each example's losses `(N, S)` in float64, from members' moments."""
        first = members[0]
        task = first.task
        by_member = list(zip(members, moments, strict=True))
        if task.has_noise:
            pairs = [moments_of_model(*member, "probit") for member in by_member]
            means, covariances = zip(*pairs, strict=True)
            mean, covariance = mix_moments(torch.stack(means), torch.stack(covariances))
            predicted = [[mean.double(), covariance.double()]]
        else:
            # (members, scales, examples, classes)
            log_p = torch.stack([self._log_p(*member) for member in by_member])
            of_mean = log_p.logsumexp(0) - math.log(len(log_p))
            predicted = [[of_scale] for of_scale in of_mean]
        targets = targets.to(predicted[0][0].device)
        losses = [task.nll(p, targets, first.sigma_noise) for p in predicted]
        return torch.stack(losses, dim=1)

    def _log_p(self, member: Posterior, moments: Moments) -> Tensor:
        """Compute log-probabilities `(S, N, C)` of a member, in float64."""
        of_model = moments_of_model(member, moments, self.link_approx)
        by_scale: list[Tensor] = []
        for scale in self.scales:
            scaled = of_model.scaled(scale * member.logit_scale)
            draws = torch.Generator().manual_seed(_SEED)
            log_p = log_probabilities(scaled, self.link_approx, self.n_samples, draws)
            by_scale.append(log_p.double())
        return torch.stack(by_scale)

    def best(self, prior_precision: Tensor, sums: Tensor, n_examples: int) -> Trial:
        """Find the best scale of sums `(S,)`, also between those that were summed."""
        if len(self.scales) == 1:
            return Trial(prior_precision, objective=sums.item() / n_examples)
        logs = np.log(self.scales)
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
        return Trial(
            prior_precision,
            logit_scale=math.exp(log_scale),
            objective=objective / n_examples,
            penalty=float(scale_penalty(log_scale)) / n_examples,
        )


def scale_penalty(log_scale: np.ndarray | float) -> np.ndarray:
    """Compute what a scale adds to a summed loss, in nats, from its logarithm."""
    return PENALTY * np.square(np.maximum(log_scale, 0))


@dataclass(frozen=True)
class NoiseSquares:
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

    def terms(
        self, members: Sequence[Posterior], moments: Sequence[Moments], targets: Tensor
    ) -> Tensor:
        """Compute each example's two numbers `(N, 2)` in float64, of one posterior."""
        (la,), (of_one,) = members, moments
        f_mu, f_var = moments_of_model(la, of_one, "probit")
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

    def best(self, prior_precision: Tensor, sums: Tensor, n_examples: int) -> Trial:
        """Find the best noise; a `ValueError` where there is no error at all."""
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
        noise = math.sqrt(variance)
        # From ρ = λ σ² to λ.
        return Trial(
            prior_precision / noise**2, sigma_noise=noise, objective=nll / n_examples
        )


@dataclass(frozen=True, eq=False)
class GridLosses:
    """Holds a score's sums over examples at every prior precision of a grid.

    Attributes
    ----------
    grid : torch.Tensor
        `(T,)` or `(T, blocks)` prior precisions; where a noise is chosen too, for a
        noise of 1
    sums : torch.Tensor
        `(T, K)`, float64
    n_examples : int
    score : Likelihoods or NoiseSquares
    ends_without_variance : bool, default=False
        whether the last prior precision is the one beyond the grid
    """

    grid: Tensor
    sums: Tensor
    n_examples: int
    score: Likelihoods | NoiseSquares
    ends_without_variance: bool = False

    def __add__(self, other: GridLosses) -> GridLosses:
        """Add what other examples say of the same prior precisions."""
        return replace(
            self,
            sums=self.sums + other.sums,
            n_examples=self.n_examples + other.n_examples,
        )

    def history(self) -> TuningHistory:
        """Choose the prior precision that the examples expect, or none.

        That is the mean of log λ, where each point weighs `exp(-summed objective)`: the
        posterior mean under a prior that is flat on the grid. Few examples say little
        of λ, and their best point is a matter of luck (docs/tried.md). Chosen is the
        point next to the mean, or the one without variance where that is better by more
        than a nat of all examples.

        A `ValueError` if there are no examples, or the losses are never finite.
        """
        if not self.n_examples:
            raise ValueError(NO_DATA)
        trials = [
            self.score.best(point, sums, self.n_examples)
            for point, sums in zip(self.grid, self.sums, strict=True)
        ]
        history = TuningHistory.of_losses(trials)  # it checks the objectives
        if math.isinf(history.loss):
            raise ValueError(
                "The validation loss is finite nowhere on the grid: check it."
            )
        n_points = len(self.grid) - self.ends_without_variance
        objective = self.n_examples * history.objective[:n_points]
        logs = self.grid[:n_points].reshape(n_points, -1).log().double().cpu()
        mean = objective.neg().softmax(0) @ logs
        choice = int((logs - mean).square().sum(1).argmin())
        if self.ends_without_variance:
            last = len(trials) - 1
            gain = history.objective[choice] - history.objective[last]
            if self.n_examples * gain > A_NAT:
                choice = last
        return replace(history, choice=choice)
