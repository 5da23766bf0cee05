"""Samples Gaussian logits, even where a covariance is singular."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


class _SymmetricRoot(torch.autograd.Function):
    """The root S solves `S S = V`; its differential solves `S dS + dS S = dV`.

    In the eigenbasis of S this divides by sums of its eigenvalues. Unlike the derivative of an
    eigendecomposition, which divides by differences, it is finite where eigenvalues coincide.
    """

    @staticmethod
    def forward(ctx: Any, covariance: torch.Tensor) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(covariance.double())
        # A 0 that rounding turned into a small number would have a much larger root.
        noise = covariance.shape[-1] * torch.finfo(covariance.dtype).eps * values[..., -1:]
        roots = torch.where(values > noise, values, 0).sqrt()
        ctx.save_for_backward(roots, vectors)
        return ((vectors * roots[..., None, :]) @ vectors.mT).to(covariance.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        roots, vectors = ctx.saved_tensors
        sums = roots[..., :, None] + roots[..., None, :]
        # A direction without variance has none under other prior precisions either.
        inverse = torch.where(sums > 0, 1 / sums, 0)
        rotated = vectors.mT @ gradient.double() @ vectors
        result = vectors @ (rotated * inverse) @ vectors.mT
        return ((result + result.mT) / 2).to(gradient.dtype)


def square_root(covariance: torch.Tensor) -> torch.Tensor:
    """Symmetric square root, once differentiable even where the covariance is singular.

    Parameters
    ----------
    covariance : torch.Tensor
        `(..., C, C)`, symmetric positive semi-definite up to rounding

    Returns
    -------
    torch.Tensor
        `(..., C, C)`
    """
    return _SymmetricRoot.apply(covariance)  # pyright: ignore[reportReturnType]


def semidefinite(covariance: torch.Tensor) -> torch.Tensor:
    """The nearest matrices `(..., C, C)` without negative eigenvalues."""
    root = square_root(covariance)
    return root @ root.mT


def gaussian_samples(f_mu: torch.Tensor, f_var: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Reparametrised samples `(S, B, C)` of logits.

    `noise` holds standard normal numbers: `(S, B, C)`, or `(S, 1, C)` for all examples alike.
    """
    root, noise = square_root(f_var), noise.to(f_mu.device)
    with torch.autocast(f_mu.device.type, enabled=False):
        if noise.shape[1] == 1:  # one product an example for all samples
            return f_mu + torch.einsum("bck,ks->sbc", root, noise[:, 0].T)
        return f_mu + (root @ noise[..., None]).squeeze(-1)


def standard_normal(
    shape: tuple[int, ...], like: torch.Tensor, generator: torch.Generator | None
) -> torch.Tensor:
    """Standard normal numbers in the dtype of `like`, drawn on the generator's device."""
    device = like.device if generator is None else generator.device
    return torch.randn(shape, generator=generator, device=device, dtype=like.dtype)
