"""Gaussian logits: a posterior's moments for a batch, and samples of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from laplace_lora_ext.predictive.contrasts import completed


class Moments(NamedTuple):
    """Mean and covariance of the logits of N examples under the linearised model.

    A Laplace approximation takes them in place of a batch, with `pred_type="glm"`. They
    are those of the model itself: what predicts by them multiplies the logits by its
    `logit_scale`.

    Attributes
    ----------
    f_mu : torch.Tensor
        `(N, C)`
    f_var : torch.Tensor
        `(N, C, C)`
    """

    f_mu: Tensor
    f_var: Tensor

    def to(
        self,
        *args: Any,
        **kwargs: Any,
    ) -> Moments:
        """Move or convert both; arguments are as for `torch.Tensor.to`."""
        f_mu = self.f_mu.to(*args, **kwargs)
        f_var = self.f_var.to(*args, **kwargs)
        return Moments(f_mu, f_var)

    def scaled(self, factor: float) -> Moments:
        """Take the moments of logits that are multiplied by a factor."""
        return Moments(factor * self.f_mu, factor**2 * self.f_var)

    def semidefinite(self) -> Moments:
        """Take the nearest covariances without negative eigenvalues."""
        root = square_root(self.f_var)
        return Moments(self.f_mu, root @ root.mT)

    def split(self, size: int) -> Iterator[Moments]:
        """Divide the examples into consecutive parts of a size."""
        means = self.f_mu.split(size)
        covariances = self.f_var.split(size)
        return map(Moments, means, covariances)


@dataclass(frozen=True, eq=False)
class DifferenceMoments:
    """Moments that tell of differences of logits alone, and not of all of them exactly.

    They serve the links "mean_field" and "mc"; whatever reads a logit by itself is
    refused. Like `Moments` they can be taken apart into `f_mu` and `f_var`.

    Attributes
    ----------
    f_mu : torch.Tensor
        `(N, C)`
    covariance : torch.Tensor
        `(N, k, k)`, of contrasts: how far other logits are from the most probable one
    classes : torch.Tensor
        `(N, 1 + k)`, which classes contrasts are of, as `Contrasts.classes` lists them
    """

    f_mu: Tensor
    covariance: Tensor
    classes: Tensor

    @property
    def f_var(self) -> Tensor:
        """Complete the covariances to `(N, C, C)`."""
        return completed(self.covariance, self.classes, self.f_mu.shape[-1])

    def __iter__(self) -> Iterator[Tensor]:
        yield self.f_mu
        yield self.f_var

    def to(
        self,
        *args: Any,
        **kwargs: Any,
    ) -> DifferenceMoments:
        """Move or convert mean and covariance; arguments as for `torch.Tensor.to`."""
        f_mu = self.f_mu.to(*args, **kwargs)
        covariance = self.covariance.to(*args, **kwargs)
        return DifferenceMoments(f_mu, covariance, self.classes.to(f_mu.device))

    def scaled(self, factor: float) -> DifferenceMoments:
        """Take the moments of logits that are multiplied by a positive factor."""
        return replace(
            self,
            f_mu=factor * self.f_mu,
            covariance=factor**2 * self.covariance,
        )

    def split(self, size: int) -> Iterator[DifferenceMoments]:
        """Divide the examples into consecutive parts of a size."""
        means = self.f_mu.split(size)
        covariances = self.covariance.split(size)
        classes = self.classes.split(size)
        return map(DifferenceMoments, means, covariances, classes)


AnyMoments = Moments | DifferenceMoments
"""Gaussian logits of N examples, of all logits or of differences alone."""


def joined_moments(parts: Sequence[Moments]) -> Moments:
    """Join the moments of consecutive parts of a batch.

    A part whose examples need fewer directions than others' gets zeros in their place.
    """
    f_mu = torch.cat([part.f_mu for part in parts])
    most = max(part.f_var.shape[-1] for part in parts)
    covariances = []
    for part in parts:
        n_missing = most - part.f_var.shape[-1]
        covariances.append(pad(part.f_var, (0, n_missing, 0, n_missing)))
    return Moments(f_mu, torch.cat(covariances))


class MixtureMoments(NamedTuple):
    """Gaussian logits of N examples by each member, in place of a batch."""

    members: tuple[AnyMoments, ...]

    def split(self, size: int) -> Iterator[MixtureMoments]:
        """Divide the examples into consecutive parts of a size."""
        of_members = [moments.split(size) for moments in self.members]
        for part in zip(*of_members, strict=True):
            yield MixtureMoments(part)


def parts_for(
    members: Sequence[object],
    x: Any,
) -> Sequence[Any]:
    """Give each member what it predicts: the batch, or its own moments."""
    if isinstance(x, MixtureMoments):
        return x.members
    return [x] * len(members)


def mixed(
    means: Tensor,
    covariances: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the moments of a mixture of Gaussians, `(M, ..., C)`."""
    mean = means.mean(0)
    apart = means - mean
    if covariances.ndim == means.ndim:
        between = apart.square()
    else:
        between = apart[..., :, None] * apart[..., None, :]
    # The law of total variance: what each member has, and how far apart their means
    # are.
    return mean, (covariances + between).mean(0)


def centred(f_var: Tensor) -> Tensor:
    """Remove from covariances `(B, C, C)` what all logits of an example share.

    That is J V J with J = I - 11ᵀ/C. Variances of differences of two logits stay as
    they are.
    """
    rows = f_var - f_var.mean(-1, keepdim=True)
    return rows - rows.mean(-2, keepdim=True)


def uncorrelated(f_var: Tensor) -> Tensor:
    """Set everything but the variances of covariances `(B, C, C)` to 0."""
    variances = f_var.diagonal(dim1=-2, dim2=-1)
    return torch.diag_embed(variances)


class _SymmetricRoot(torch.autograd.Function):
    """The root S solves `S S = V`; its differential solves `S dS + dS S = dV`.

    In the eigenbasis of S this divides by sums of its eigenvalues. Unlike the
    derivative of an eigendecomposition, which divides by differences, it is finite
    where eigenvalues coincide.
    """

    @staticmethod
    def forward(
        ctx: Any,
        covariance: Tensor,
    ) -> Tensor:
        values, vectors = torch.linalg.eigh(covariance.double())
        # A 0 that rounding turned into a small number would have a much larger root.
        rounding = covariance.shape[-1] * torch.finfo(covariance.dtype).eps
        largest = values[..., -1:]
        values = torch.where(values > rounding * largest, values, 0)
        roots = values.sqrt()
        ctx.save_for_backward(roots, vectors)
        scaled = vectors * roots[..., None, :]
        root = scaled @ vectors.mT
        return root.to(covariance.dtype)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        gradient: Tensor,
    ) -> Tensor:
        roots, vectors = ctx.saved_tensors
        sums = roots[..., :, None] + roots[..., None, :]
        # A direction without variance has none under other prior precisions either.
        inverse = torch.where(sums > 0, 1 / sums, 0)
        rotated = vectors.mT @ gradient.double() @ vectors
        solution = rotated * inverse
        result = vectors @ solution @ vectors.mT
        # The gradient need not be symmetric, but covariances are.
        symmetric = (result + result.mT) / 2
        return symmetric.to(gradient.dtype)


def square_root(covariance: Tensor) -> Tensor:
    """Take symmetric square roots `(..., C, C)`, differentiable once.

    V may be singular.
    """
    return _SymmetricRoot.apply(covariance)  # pyright: ignore[reportReturnType]


def gaussian_samples(
    f_mu: Tensor,
    f_var: Tensor,
    noise: Tensor,
) -> Tensor:
    """Turn noise into reparametrised samples `(S, B, C)` of logits.

    `noise` holds standard normal numbers: `(S, B, C)`, or `(S, 1, C)` for all examples
    alike. There may be more dimensions than one before C.
    """
    root = square_root(f_var)
    noise = noise.to(f_mu.device)
    with torch.autocast(f_mu.device.type, enabled=False):
        apart = torch.einsum("...ck,s...k->s...c", root, noise)
    return f_mu + apart


def standard_normal(
    shape: tuple[int, ...],
    like: Tensor,
    generator: torch.Generator | None,
) -> Tensor:
    """Draw normal numbers in the dtype of `like`, on the generator's device."""
    device = like.device if generator is None else generator.device
    return torch.randn(
        shape,
        generator=generator,
        device=device,
        dtype=like.dtype,
    )
