"""Maximises evidence in the prior precision: pure optimisation of functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import tqdm

from laplace_lora_ext.linearized.model import EvidenceAtMode
from laplace_lora_ext.messages import warn
from laplace_lora_ext.tuning.history import REACH, Recorder, TuningHistory

_WINDOW = 10  # steps over which the evidence must be steady
_WORST_MODE = 0.1  # nats that an inexact mode may cost the evidence
_REMEMBERED = 5  # steps that an accelerated search combines
_LARGEST_STEP = math.log(10)  # in the logarithm of a prior precision, of an accelerated search


def maximize_evidence(
    evidence: Callable[..., torch.Tensor],
    logarithms: Sequence[torch.Tensor],
    n_steps: int,
    lr: float,
    tolerance: float,
    progress_bar: bool = False,
) -> TuningHistory:
    """Climb the evidence in the logarithm of a prior precision, and perhaps of a noise.

    The logarithms are leaves, and change in place; that of the prior precision comes first. The
    other arguments are those of `Marglik`. The evidence is smooth, has no noise and, for a
    layerwise prior, is a sum of functions of one variable each. That suits Rprop, which adapts each
    variable's step to the signs of its slopes.

    References
    ----------
    Riedmiller & Braun, "A direct adaptive method for faster backpropagation learning: the RPROP
    algorithm", ICNN 1993.
    """
    recorder = Recorder()
    optimizer = torch.optim.Rprop(logarithms, lr=lr, step_sizes=(1e-6, 1.0))
    steps = tqdm.trange(n_steps, desc="[Maximizing evidence]", disable=not progress_bar)
    spread = math.inf
    for step in steps:
        optimizer.zero_grad()
        value = evidence(*(logarithm.exp() for logarithm in logarithms))
        recorder.add(step, value.item(), logarithms[0].exp())
        recent = recorder.objectives[-_WINDOW - 1 :]
        if len(recent) > _WINDOW:
            spread = max(recent) - min(recent)
            if spread < tolerance:
                break
        (-value).backward()
        optimizer.step()
        for logarithm in logarithms:
            logarithm.detach().clamp_(*REACH)
    else:
        if tolerance > 0:
            warn(
                f"The evidence has not converged in {n_steps} steps: it varied by {spread:.3g} "
                "nats over the last ten. Raise n_steps or lr."
            )
    return recorder.history()


def maximize_linearized_evidence(
    evidence: Callable[[torch.Tensor], EvidenceAtMode],
    prior_precision: torch.Tensor,
    n_steps: int,
    tolerance: float,
    pooling: float = 0.0,
    progress_bar: bool = False,
) -> TuningHistory:
    """Climb the evidence of a linearised model, which has another mode at each step.

    In a maximum, the number of a block's directions that the data determine equals its prior
    precision times the squared distance of its mode: γ = λ ‖u‖². Each step sets λ = γ / ‖u‖².

    Pooling gives a layerwise prior precision a gamma hyperprior. Its mode is the scalar λ₀ that the
    evidence prefers. The objective is then the evidence plus `κ/2 Σ (log ρ - ρ + 1)` over the
    blocks' ratios ρ = λ / λ₀, and each step sets λ = (γ + κ) / (‖u‖² + κ / λ₀), as if the data
    determined κ more directions of each block, as far from the prior mean as λ₀ expects. Such steps
    alone converge linearly, so each is combined with those before it by Anderson's method.

    The search for λ₀ starts at the geometric mean of the prior precision, `(1,)` or `(blocks,)`,
    and the search for the blocks at λ₀. The history is that of the last search, with the result as
    its last row.

    References
    ----------
    MacKay, "Bayesian interpolation", Neural Computation 4 (1992), for the step.
    Tipping, "Sparse Bayesian learning and the relevance vector machine", JMLR 1 (2001), for the
    step with a gamma hyperprior.
    Walker & Ni, "Anderson acceleration for fixed-point iterations", SIAM J. Numer. Anal. 49 (2011).
    Antorán et al. (ICML 2022), section 4.
    """
    search = n_steps, tolerance, progress_bar
    if pooling == 0 or len(prior_precision) == 1:
        return _ascend(evidence, prior_precision, 0.0, *search)
    mean = prior_precision.log().mean(0, keepdim=True).exp()
    scalar = _ascend(evidence, mean, 0.0, *search).prior_precision[-1]
    return _ascend(evidence, scalar.expand_as(prior_precision), pooling, *search)


def _ascend(
    evidence: Callable[[torch.Tensor], EvidenceAtMode],
    start: torch.Tensor,
    pooling: float,
    n_steps: int,
    tolerance: float,
    progress_bar: bool,
) -> TuningHistory:
    """One search, with a hyperprior of strength `pooling` around the start."""
    prior_precision = start
    recorder, acceleration = Recorder(), _Acceleration()
    steps = tqdm.trange(n_steps, desc="[Maximizing linearized evidence]", disable=not progress_bar)
    error = change = math.inf
    for step in steps:
        value, dimension, scatter, error = evidence(prior_precision)
        ratio = prior_precision / start
        hyperprior = pooling / 2 * (ratio.log() - ratio + 1).sum().item()
        recorder.add(step, value + hyperprior, prior_precision)
        if step:
            change = abs(recorder.objectives[-1] - recorder.objectives[-2])
        if change < tolerance:
            break
        if len(prior_precision) == 1:
            dimension, scatter = dimension.sum(0, keepdim=True), scatter.sum(0, keepdim=True)
        dimension, scatter = dimension + pooling, scatter + pooling / start
        # A block without any gradient neither moves nor determines anything: 0 / 0.
        updated = torch.where(scatter > 0, dimension / scatter, prior_precision)
        target = updated.log().clamp(*REACH)
        weight = dimension.sqrt()  # such steps gain as much evidence in each block
        updated = acceleration.next(prior_precision.log(), target, weight, recorder.objectives[-1])
        prior_precision = updated.clamp(*REACH).exp()
    else:
        if tolerance > 0:
            warn(
                f"The linearized evidence has not converged in {n_steps} steps: the last one "
                f"changed it by {change:.3g} nats. Raise n_steps."
            )
    if error > _WORST_MODE:
        warn(
            f"The linearized model's mode is inexact: the evidence may be {error:.3g} nats too low."
        )
    return recorder.history()


class _Acceleration:
    """Anderson's: of the last points and where a step leads from each, the next point.

    It takes the combination of the points at which the steps, if they were linear, would be
    shortest, and makes the step there. Where the objective has fallen, it goes back to the point
    before, and makes its step alone.
    """

    def __init__(self) -> None:
        self._points: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._objective = -math.inf

    def next(
        self, point: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, objective: float
    ) -> torch.Tensor:
        """From a point, where the step leads from it, and how much each number counts, `(n,)`."""
        if objective < self._objective and len(self._points) > 1:
            self._points, self._targets = self._points[-1:], self._targets[-1:]
            return self._targets[0]
        self._objective = objective
        self._points = [*self._points[-_REMEMBERED:], point]
        self._targets = [*self._targets[-_REMEMBERED:], target]
        if len(self._points) == 1:
            return target
        points, targets = torch.stack(self._points, dim=1), torch.stack(self._targets, dim=1)
        # Changes may depend on each other: the least combination, by a driver for such matrices.
        changes, step = (targets - points).diff(), target - point
        shares = torch.linalg.lstsq(
            weight[:, None] * changes, (weight * step)[:, None], driver="gelsd"
        ).solution
        combined = step - (targets.diff() @ shares)[:, 0]
        return point + combined.clamp(-_LARGEST_STEP, _LARGEST_STEP)
