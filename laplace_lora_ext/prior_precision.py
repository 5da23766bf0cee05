"""Searches for a prior precision: pure optimisation, of functions that the caller provides."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import tqdm

from laplace_lora_ext.linearized_model import EvidenceAtMode
from laplace_lora_ext.predictive_statistics import PredictiveStatistics
from laplace_lora_ext.validation_losses import NegativeLogLikelihood

_WINDOW = 10  # steps over which the evidence must be steady
_CHECKPOINTS = 20  # of the validation loss along a descent
_CHUNK = 256  # examples whose logits are sampled at once for a checkpoint
_RANGE = (math.log(torch.finfo(torch.float32).tiny), math.log(torch.finfo(torch.float32).max))
_WORST_MODE = 0.1  # nats that the evidence may lack because of an inexact mode
_LONGEST_ROW = 10_000  # prior precisions of a step that a history keeps


@dataclass(frozen=True)
class TuningHistory:
    """What a search for a prior precision has tried, ready to be plotted.

    Attributes
    ----------
    step : torch.Tensor
        `(T,)` number of the step, or of the point of a grid
    objective : torch.Tensor
        `(T,)`, float64: the log marginal likelihood, with the hyperprior where prior precisions
        are pooled, or the validation loss
    prior_precision : torch.Tensor
        `(T, 1)` or `(T, blocks)`, at which the objective was evaluated; for a diagonal prior of
        more than 10,000 weights `(1, parameters)`, that of the last step alone
    """

    step: torch.Tensor
    objective: torch.Tensor
    prior_precision: torch.Tensor


class _Recorder:
    """Gathers a history."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self.objectives: list[float] = []
        self._rows: list[torch.Tensor] = []

    def add(self, step: int, objective: float, prior_precision: torch.Tensor) -> None:
        """Record a step.

        Raises
        ------
        ValueError
            If the objective is not a number.
        """
        row = prior_precision.detach().flatten().cpu()
        if math.isnan(objective):
            span = f"from {row.min().item():.3g} to {row.max().item():.3g}"
            raise ValueError(f"The objective is not a number at prior precisions {span}.")
        if row.numel() > _LONGEST_ROW:
            self._rows.clear()
        self._steps.append(step)
        self.objectives.append(objective)
        self._rows.append(row)

    def history(self) -> TuningHistory:
        return TuningHistory(
            torch.tensor(self._steps),
            torch.tensor(self.objectives, dtype=torch.float64),
            torch.stack(self._rows),
        )


def maximize_evidence(
    evidence: Callable[..., torch.Tensor],
    logarithms: Sequence[torch.Tensor],
    n_steps: int,
    lr: float,
    tolerance: float,
    progress_bar: bool = False,
) -> TuningHistory:
    """Ascend the evidence in the logarithms of a prior precision, and of a noise if there is one.

    The evidence is smooth, free of noise and, for a layerwise prior, a sum of functions of one
    variable each: a case for Rprop, which adapts each variable's step to the signs of its slopes.

    Parameters
    ----------
    evidence : callable
        log marginal likelihood as a function of what `logarithms` are the logarithms of
    logarithms : sequence of torch.Tensor
        leaves that are changed in place, that of the prior precision first; they are kept
        within the range of float32
    n_steps : int
        at most
    lr : float
        first step
    tolerance : float
        stop when the evidence has varied by less over ten steps, in nats; 0 takes all steps
    progress_bar : bool, default=False

    Returns
    -------
    TuningHistory

    References
    ----------
    Yang et al. (ICLR 2024), algorithm 2, for the objective.
    Riedmiller & Braun, "A direct adaptive method for faster backpropagation learning: the RPROP
    algorithm", ICNN 1993.
    """
    recorder = _Recorder()
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
            logarithm.detach().clamp_(*_RANGE)
    else:
        if tolerance > 0:
            warnings.warn(
                f"The evidence has not converged in {n_steps} steps: it varied by {spread:.3g} "
                "nats over the last ten. Raise n_steps or lr.",
                stacklevel=4,
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
    """Ascend the evidence of a linearised model, whose mode is found anew at each step.

    In a maximum, the directions of a block that the data determine are as many as its prior
    precision times the squared distance of its mode: γ = λ ‖u‖². Each step takes λ = γ / ‖u‖².

    Pooling gives a layerwise prior precision a gamma hyperprior, whose mode is the scalar λ₀ that
    the evidence prefers. The objective is then the evidence plus `κ/2 Σ (log ρ - ρ + 1)` over the
    blocks' ratios ρ = λ / λ₀, and a step takes λ = (γ + κ) / (‖u‖² + κ / λ₀): as if the data had
    determined κ more directions of each block, as far from the prior mean as λ₀ expects.

    Parameters
    ----------
    evidence : callable
        of a prior precision
    prior_precision : torch.Tensor
        `(1,)` or `(blocks,)`, where to start; with pooling, its geometric mean is where the search
        for λ₀ starts, and λ₀ where that for the rest does
    n_steps : int
        at most, of each search
    tolerance : float
        stop when a step has changed the objective by less, in nats; 0 takes all steps
    pooling : float, default=0.0
        κ, which a scalar does not need
    progress_bar : bool, default=False

    Returns
    -------
    TuningHistory
        of the last search; its last row is the result

    References
    ----------
    MacKay, "Bayesian interpolation", Neural Computation 4 (1992), for the step.
    Tipping, "Sparse Bayesian learning and the relevance vector machine", JMLR 1 (2001), for the
    step with a gamma hyperprior.
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
    """One search, with a hyperprior of the strength `pooling` around its start."""
    prior_precision = start
    recorder = _Recorder()
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
        # A block that no gradient has reached moves nowhere and determines nothing: 0 / 0.
        updated = torch.where(scatter > 0, dimension / scatter, prior_precision)
        prior_precision = updated.log().clamp(*_RANGE).exp()
    else:
        if tolerance > 0:
            warnings.warn(
                f"The linearized evidence has not converged in {n_steps} steps: the last one "
                f"changed it by {change:.3g} nats. Raise n_steps.",
                stacklevel=4,
            )
    if error > _WORST_MODE:
        warnings.warn(
            f"The linearized model's mode is inexact: its evidence may lack {error:.3g} nats.",
            stacklevel=4,
        )
    return recorder.history()


def search_grid(
    loss: Callable[[torch.Tensor], float], grid: torch.Tensor, progress_bar: bool = False
) -> TuningHistory:
    """Evaluate a loss at every prior precision of a grid.

    Raises
    ------
    ValueError
        If the loss is not a number somewhere, or finite nowhere.
    """
    recorder = _Recorder()
    points = tqdm.tqdm(grid, disable=not progress_bar)
    for index, point in enumerate(points):
        result = loss(point)
        points.set_description(f"[Grid search | prior_prec: {point:.3e}, loss: {result:.3f}]")
        recorder.add(index, result, point)
    if not any(map(math.isfinite, recorder.objectives)):
        raise ValueError("The validation loss is finite at no point of the grid.")
    if len(recorder.objectives) > 1 and len(set(recorder.objectives)) == 1:
        warnings.warn(
            "The validation loss is the same at every point of the grid. Pass a loss that depends "
            "on the predictive variance: the mean squared error of the linearised mean does not.",
            stacklevel=4,
        )
    return recorder.history()


def minimize_validation_loss(
    statistics: PredictiveStatistics,
    log_prior_precision: torch.Tensor,
    negative_log_likelihood: NegativeLogLikelihood,
    n_steps: int,
    lr: float,
    batch_size: int,
    generator: torch.Generator | None = None,
    progress_bar: bool = False,
) -> TuningHistory:
    """Stochastic gradient descent on the validation loss, in the logarithm of the prior precision.

    Unlike the paper's constant step size, this one falls to 0 along half a cosine, so that the
    last steps average over minibatches. The loss of the whole set is measured before the first
    step and 20 times on the way, always with the same draws.

    Parameters
    ----------
    statistics : PredictiveStatistics
        with targets
    log_prior_precision : torch.Tensor
        leaf `(1,)` or `(blocks,)`, changed in place: to the best of the measured ones
    negative_log_likelihood : callable
    n_steps : int
    lr : float
        Adam's step size at the start
    batch_size : int
        examples in a minibatch
    generator : torch.Generator, optional
        draws minibatches and what is sampled
    progress_bar : bool, default=False

    Returns
    -------
    TuningHistory

    References
    ----------
    Yang et al. (ICLR 2024), algorithm 3.
    """
    targets = statistics.targets
    assert targets is not None
    recorder = _Recorder()
    optimizer = torch.optim.Adam([log_prior_precision], lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=n_steps)
    seed = _seed(generator)

    def measure(step: int) -> None:
        draws = torch.Generator().manual_seed(seed)
        prior_precision = log_prior_precision.detach().exp()
        total = 0.0
        for start in range(0, len(statistics), _CHUNK):
            part = slice(start, start + _CHUNK)
            moments = statistics[part].moments(prior_precision)
            total += negative_log_likelihood(moments, targets[part], draws).sum().item()
        recorder.add(step, total / len(statistics), prior_precision)

    minibatches = _minibatches(len(statistics), batch_size, generator)
    every = max(1, n_steps // _CHECKPOINTS)
    steps = tqdm.trange(n_steps, desc="[Minimizing validation loss]", disable=not progress_bar)
    measure(0)
    for step in steps:
        index = next(minibatches)
        optimizer.zero_grad()
        moments = statistics[index].moments(log_prior_precision.exp())
        negative_log_likelihood(moments, targets[index], generator).mean().backward()
        optimizer.step()
        log_prior_precision.detach().clamp_(*_RANGE)
        schedule.step()
        if (step + 1) % every == 0 or step + 1 == n_steps:
            measure(step + 1)
    history = recorder.history()
    best = history.prior_precision[history.objective.argmin()]
    with torch.no_grad():
        log_prior_precision.copy_(best.log())
    return history


def _seed(generator: torch.Generator | None) -> int:
    if generator is None:
        return int(torch.randint(2**31, ()).item())
    return int(torch.randint(2**31, (), generator=generator, device=generator.device).item())


def _minibatches(
    n_examples: int, batch_size: int, generator: torch.Generator | None
) -> Iterator[torch.Tensor]:
    """Random minibatches without end, each example once a round."""
    device = None if generator is None else generator.device
    while True:
        order = torch.randperm(n_examples, generator=generator, device=device)
        yield from order.cpu().split(batch_size)
