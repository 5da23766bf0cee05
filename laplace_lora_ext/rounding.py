"""When two computations of the same numbers are equal, up to rounding."""

from __future__ import annotations

import torch
from torch import Tensor

OF_PASSES = 10_000
"""Units in the last place by which logits may differ: those of many layers add up."""

_MOST = 0.05  # where units in the last place are large, as in half precision


def equal_up_to_rounding(
    found: Tensor, expected: Tensor, dtype: torch.dtype, units: int = 16
) -> bool:
    """Tell whether numbers differ by a few units in the last place of the largest.

    `dtype` is the precision that they were computed in, and not always their own.
    """
    if found.shape != expected.shape:
        return False
    if torch.equal(found, expected):  # also of none at all
        return True
    largest = expected.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    atol = largest * min(units * torch.finfo(dtype).eps, _MOST)
    return torch.allclose(found, expected, rtol=0.0, atol=atol, equal_nan=True)
