"""Searches the least loss of prior precisions: on a grid, or along its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import tqdm

from laplace_lora_ext.messages import warn
from laplace_lora_ext.tuning.history import REACH, Recorder, TuningHistory


def grid_of_priors(
    low: float, high: float, size: int, power: float, base: torch.Tensor | None
) -> torch.Tensor:
    """Powers of a number as `(size,)` prior precisions, or times a base, as `(size, blocks)`."""
    # In float32, whatever the default is.
    grid = torch.logspace(low, high, size, base=power, dtype=torch.float32)
    return grid if base is None else grid[:, None].to(base) * base


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


def descent(
    loss: Callable[[], torch.Tensor],
    logarithms: Sequence[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    n_steps: int,
    description: str,
    progress_bar: bool,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Follow the gradient of a loss, whose leaves `logarithms` change in place.

    Yields
    ------
    step : int
    loss : torch.Tensor
        before the step, which the next iteration takes
    """
    for step in tqdm.trange(n_steps, desc=description, disable=not progress_bar):
        optimizer.zero_grad()
        value = loss()
        yield step, value
        value.backward()
        optimizer.step()
        for logarithm in logarithms:
            logarithm.detach().clamp_(*REACH)


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw a seed for another generator."""
    if generator is None:
        return int(torch.randint(2**31, ()).item())
    return int(torch.randint(2**31, (), generator=generator, device=generator.device).item())
