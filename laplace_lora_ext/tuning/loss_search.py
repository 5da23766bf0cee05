"""Minimises a loss in the prior precision: pure optimisation of functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import tqdm

from laplace_lora_ext.messages import warn
from laplace_lora_ext.predictive.moments import Moments
from laplace_lora_ext.predictive.statistics import PredictiveStatistics
from laplace_lora_ext.tuning.history import REACH, Recorder, TuningHistory

NegativeLogLikelihood = Callable[[Moments, torch.Tensor, "torch.Generator | None"], torch.Tensor]
"""Takes moments, targets and a generator for samples, and returns the loss of each example."""

_CHECKPOINTS = 20  # how often a descent measures the whole validation loss
_CHUNK = 256  # examples whose logits a checkpoint samples at once


def grid_of_priors(
    low: float, high: float, size: int, base: float, around: torch.Tensor | None
) -> torch.Tensor:
    """Powers of a base as `(size,)` prior precisions, or `(size, blocks)` factors around others."""
    # In float32, whatever the default is.
    grid = torch.logspace(low, high, size, base=base, dtype=torch.float32)
    return grid if around is None else grid[:, None].to(around) * around


def search_grid(
    loss: Callable[[torch.Tensor], float], grid: torch.Tensor, progress_bar: bool = False
) -> TuningHistory:
    """Evaluate a loss at every prior precision of a grid, `(T,)` or `(T, blocks)`.

    A loss that is nan anywhere, or finite nowhere, is refused.
    """
    recorder = Recorder()
    points = tqdm.tqdm(grid, disable=not progress_bar)
    for index, point in enumerate(points):
        result = loss(point)
        middle = point.log().mean().exp()
        points.set_description(f"[Grid search | prior_prec: {middle:.3e}, loss: {result:.3f}]")
        recorder.add(index, result, point)
    if not any(map(math.isfinite, recorder.objectives)):
        raise ValueError("The validation loss is finite at no point of the grid.")
    if len(recorder.objectives) > 1 and len(set(recorder.objectives)) == 1:
        warn(
            "The validation loss is the same at every point of the grid. Pass a loss that depends "
            "on the predictive variance; the mean squared error of the mean, for one, does not."
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

    Unlike the paper's constant step size, this one falls to 0 along half a cosine, so that the last
    steps average over minibatches. It measures the loss of the whole set before the first step and
    20 times on the way, always with the same draws: these are the history. The leaf
    `log_prior_precision` changes in place. The other arguments are those of `ValGD`.
    """
    targets = statistics.required_targets()
    recorder = Recorder()
    optimizer = torch.optim.Adam([log_prior_precision], lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=n_steps)
    seed = draw_seed(generator)

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
        log_prior_precision.detach().clamp_(*REACH)
        schedule.step()
        if (step + 1) % every == 0 or step + 1 == n_steps:
            measure(step + 1)
    return recorder.history()


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw a seed for another generator."""
    if generator is None:
        return int(torch.randint(2**31, ()).item())
    return int(torch.randint(2**31, (), generator=generator, device=generator.device).item())


def _minibatches(
    n_examples: int, batch_size: int, generator: torch.Generator | None
) -> Iterator[torch.Tensor]:
    """Random minibatches without end, with each example once a round."""
    device = None if generator is None else generator.device
    while True:
        order = torch.randperm(n_examples, generator=generator, device=device)
        yield from order.cpu().split(batch_size)
