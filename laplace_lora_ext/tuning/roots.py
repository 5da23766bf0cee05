"""Where a function of the prior precision passes a value: pure search."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from scipy.optimize import brentq

FARTHEST = math.log(1e8)  # of a factor of the prior precision where the search starts
_STRIDE = math.log(10.0)  # from one factor to the next until the value is passed
_ACCURACY = 1e-2  # of the logarithm of the factor


def falling_root(excess: Callable[[float], float], reach: float = FARTHEST) -> float:
    """Where a falling function of a factor's logarithm passes 0, or the end of its reach."""
    excess = cache(excess)
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
