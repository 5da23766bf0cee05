"""Rows with eigenvalues that decay, as those of activations and gradients do."""

import torch


def decaying_rows(
    n: int, d: int, power: float = 1.0, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """`(n, d)`, of which direction i has the standard deviation `i ** -power`."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.arange(1, d + 1, dtype=dtype).pow(-power)
    basis = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=dtype)).Q
    return (torch.randn(n, d, generator=generator, dtype=dtype) * scales) @ basis
