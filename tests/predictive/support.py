"""What tests of predictions have in common."""

import torch

from tests.support.posteriors import generator


def randn(
    *shape: int,
    seed: int = 0,
) -> torch.Tensor:
    """Draw standard normal numbers in float64, the same for a seed."""
    return torch.randn(
        *shape,
        generator=generator(seed),
        dtype=torch.float64,
    )
