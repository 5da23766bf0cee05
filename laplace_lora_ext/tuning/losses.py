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
    """Scores predictions of classes by their likelihood, at several scales.

    An example's numbers are its negative log-likelihoods, one for each scale s of
    `link(s f, s² V)`. Without a variance, s is the inverse of a temperature, and s = 1
    is the prior alone: what is best of all priors and scales is no worse than either.

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

    @property
    def is_free(self) -> bool:
        """Tell whether a scale is chosen beside each prior precision."""
        return len(self.scales) > 1

    def terms(
        self, members: Sequence[Posterior], moments: Sequence[Moments], targets: Tensor
    ) -> Tensor:
        """Compute each example's losses `(N, S)` in float64, from members' moments."""
        by_member = zip(members, moments, strict=True)
        # (members, scales, examples, classes)
        log_p = torch.stack([self._log_p(*member) for member in by_member])
        of_mean = log_p.logsumexp(0) - math.log(len(log_p))
        targets = targets.to(of_mean.device)
        losses = [members[0].task.nll(of_scale, targets) for of_scale in of_mean]
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
        if not self.is_free:
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
    """Scores predictions of numbers by their density, at a noise or at the best one.

    With residuals r, an example's negative log-likelihood at the noise σ is

        ½ log det(2π (σ² I + V)) + ½ rᵀ (σ² I + V)⁻¹ r

    and its numbers are `rᵀ (σ² I + V)⁻¹ r` and `log det(σ² I + V)`. Where the noise is
    to be chosen, the grid is of ρ = λ σ², with prior precision λ, and σ is 1 meanwhile,
    the posterior's too. Then all covariances are σ² times these, with matrices that σ
    is not in: the best σ² is the mean of the first number, for each output.

    Parameters
    ----------
    n_outputs : int
    noise : float, optional
        σ; None to choose it
    """

    n_outputs: int
    noise: float | None = None

    @property
    def is_free(self) -> bool:
        """Tell whether a noise is chosen beside each prior precision."""
        return self.noise is None

    def terms(
        self, members: Sequence[Posterior], moments: Sequence[Moments], targets: Tensor
    ) -> Tensor:
        """Compute each example's two numbers `(N, 2)` in float64.

        A `torch.linalg.LinAlgError` if rounding left no covariance.
        """
        by_member = zip(members, moments, strict=True)
        pairs = [moments_of_model(*member, "probit") for member in by_member]
        means, covariances = (torch.stack(parts) for parts in zip(*pairs, strict=True))
        mean, covariance = mix_moments(means.double(), covariances.double())
        residuals = targets.to(mean.device).double() - mean
        variance = 1.0 if self.noise is None else self.noise**2
        identity = torch.eye(self.n_outputs).to(covariance)
        root = torch.linalg.cholesky(variance * identity + covariance)
        whitened = torch.linalg.solve_triangular(
            root, residuals[..., None], upper=False
        )
        squares = whitened.square().sum((-2, -1))
        log_det = 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return torch.stack([squares, log_det], dim=1)

    def best(self, prior_precision: Tensor, sums: Tensor, n_examples: int) -> Trial:
        """Find the best noise; a `ValueError` where there is no error at all."""
        squares, log_dets = sums.tolist()
        n_numbers = n_examples * self.n_outputs
        if self.noise is not None:
            nll = (n_numbers * math.log(2 * math.pi) + log_dets + squares) / 2
            return Trial(prior_precision, objective=nll / n_examples)
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
        # From ρ = λ σ² to λ.
        return Trial(
            prior_precision / variance,
            sigma_noise=math.sqrt(variance),
            objective=nll / n_examples,
        )


def expected_choice(
    grid: Tensor, sums: Tensor, n_examples: int, score: Likelihoods | NoiseSquares
) -> TuningHistory:
    """Choose the prior precision that the examples expect, or none.

    That is the mean of log λ, where each point weighs `exp(-summed objective)`: the
    posterior mean under a prior that is flat on the grid. Few examples say little of λ,
    and their best point is a matter of luck (docs/tried.md). Chosen is the point next
    to the mean, or the one without variance where that is better by more than a nat of
    all examples.

    Parameters
    ----------
    grid : torch.Tensor
        `(T,)` or `(T, blocks)` prior precisions; where a noise is chosen too, for a
        noise of 1
    sums : torch.Tensor
        `(T, K)`, the score's terms, summed over examples in float64
    n_examples : int
    score : Likelihoods or NoiseSquares
        if it is free, the last prior precision is the one beyond the grid

    Raises
    ------
    ValueError
        If there are no examples, or the losses are never finite.
    """
    if not n_examples:
        raise ValueError(NO_DATA)
    trials = [
        score.best(point, of_point, n_examples)
        for point, of_point in zip(grid, sums, strict=True)
    ]
    history = TuningHistory.of_losses(trials)  # it checks the objectives
    if math.isinf(history.loss):
        raise ValueError("The validation loss is finite nowhere on the grid: check it.")
    n_points = len(grid) - score.is_free
    objective = n_examples * history.objective[:n_points]
    logs = grid[:n_points].reshape(n_points, -1).log().double().cpu()
    mean = objective.neg().softmax(0) @ logs
    choice = int((logs - mean).square().sum(1).argmin())
    if score.is_free:
        last = len(trials) - 1
        gain = history.objective[choice] - history.objective[last]
        if n_examples * gain > A_NAT:
            choice = last
    return replace(history, choice=choice)
