"""Searches the factor of a prior precision at which something falling has a given value."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
import tqdm
from scipy.optimize import brentq

from laplace_lora_ext.tuning.history import Recorder, TuningHistory

FARTHEST = math.log(1e8)  # of a factor of the prior precision where the search starts
_STRIDE = math.log(10.0)  # from one factor to the next until the value is passed
_ACCURACY = 1e-2  # of the logarithm of the factor


def matched(
    value: Callable[[torch.Tensor], float],
    target: float,
    start: torch.Tensor,
    reach: float = FARTHEST,
    description: str = "",
    progress_bar: bool = False,
) -> tuple[torch.Tensor, TuningHistory]:
    """The multiple of a prior precision at which a falling function of it has a given value.

    Parameters
    ----------
    value : callable
    target : float
    start : torch.Tensor
        where the search starts
    reach : float
        the largest logarithm of a factor, either way; if the target lies beyond, it is the result
    description, progress_bar
        of the bar

    Returns
    -------
    prior_precision : torch.Tensor
    history : TuningHistory
        what was tried, the nearest last
    """
    recorder = Recorder()
    with tqdm.tqdm(desc=description, disable=not progress_bar) as bar:

        @cache
        def excess(log_factor: float) -> float:
            prior_precision = math.exp(log_factor) * start
            found = value(prior_precision)
            recorder.add(len(recorder.objectives), found, prior_precision)
            bar.update()
            return found - target

        return math.exp(falling_root(excess, reach)) * start, recorder.history()


def falling_root(excess: Callable[[float], float], reach: float = FARTHEST) -> float:
    """Where a falling function of a factor's logarithm passes 0, or the end of its reach."""
    here, value = 0.0, excess(0.0)
    direction = 1.0 if value > 0 else -1.0
    while abs(here) < reach:
        there = max(-reach, min(here + direction * _STRIDE, reach))
        next_value = excess(there)
        if (next_value > 0) != (value > 0):
            root = brentq(excess, *sorted((here, there)), xtol=_ACCURACY)
            assert isinstance(root, float)
            return root
        here, value = there, next_value
    return here
