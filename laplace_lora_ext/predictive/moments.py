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


@dataclass(frozen=True, eq=False)
class Moments(Sequence[Tensor]):
    """Mean and covariance of the logits of N examples under the linearised model.

    A Laplace approximation takes them in place of a batch, with `pred_type="glm"`. They
    are those of the model itself: what predicts by them multiplies the logits by its
    `logit_scale`. `f_mu, f_var = moments` takes them apart.

    Parameters
    ----------
    f_mu : torch.Tensor
        `(N, C)`
    covariance : torch.Tensor
        `(N, C, C)` of the logits; or, if there are `classes`, `(N, k, k)` of contrasts:
        how far other logits are from the most probable one
    classes : torch.Tensor, optional
        `(N, 1 + k)`, which classes contrasts are of, as `Contrasts.classes` lists them.
        Such moments serve the links "mean_field" and "mc"; whatever reads a logit by
        itself refuses them
    """

    f_mu: Tensor
    covariance: Tensor
    classes: Tensor | None = None

    @property
    def f_var(self) -> Tensor:
        """Return covariances `(N, C, C)`, completed where they are of contrasts."""
        if self.classes is None:
            return self.covariance
        return completed(self.covariance, self.classes, self.f_mu.shape[-1])

    def __iter__(self) -> Iterator[Tensor]:
        yield self.f_mu
        yield self.f_var

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def to(self, *args: Any, **kwargs: Any) -> Moments:
        """Move or convert both; arguments are as for `torch.Tensor.to`."""
        f_mu = self.f_mu.to(*args, **kwargs)
        covariance = self.covariance.to(*args, **kwargs)
        classes = None if self.classes is None else self.classes.to(f_mu.device)
        return Moments(f_mu, covariance, classes)

    def scaled(self, factor: float) -> Moments:
        """Return the moments of logits that are multiplied by a positive factor."""
        return replace(
            self, f_mu=factor * self.f_mu, covariance=factor**2 * self.covariance
        )

    def split(self, size: int) -> Iterator[Moments]:
        """Divide the examples into consecutive parts of a size."""
        for rows in torch.arange(len(self.f_mu)).split(size):
            classes = None if self.classes is None else self.classes[rows]
            yield Moments(self.f_mu[rows], self.covariance[rows], classes)

    def semidefinite(self) -> Moments:
        """Return the nearest covariances without negative eigenvalues."""
        root = square_root(self.f_var)
        return Moments(self.f_mu, root @ root.mT)


def join_moments(parts: Sequence[Moments]) -> Moments:
    """Join the moments of consecutive parts of a batch.

    A part whose examples need fewer directions than others' gets zeros in their place.
    """
    f_mu = torch.cat([part.f_mu for part in parts])
    most = max(part.covariance.shape[-1] for part in parts)
    covariances = []
    for part in parts:
        n_missing = most - part.covariance.shape[-1]
        covariances.append(pad(part.covariance, (0, n_missing, 0, n_missing)))
    return Moments(f_mu, torch.cat(covariances))


class MixtureMoments(NamedTuple):
    """Gaussian logits of N examples by each member, in place of a batch."""

    members: tuple[Moments, ...]


def parts_for(members: Sequence[object], x: Any) -> Sequence[Any]:
    """Return what each member predicts: the batch, or its own moments."""
    return x.members if isinstance(x, MixtureMoments) else [x] * len(members)


def mix_moments(means: Tensor, covariances: Tensor) -> tuple[Tensor, Tensor]:
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


def centre(f_var: Tensor) -> Tensor:
    """Remove from covariances `(B, C, C)` what all logits of an example share.

    That is J V J with J = I - 11ᵀ/C. Variances of differences of two logits stay as
    they are.
    """
    rows = f_var - f_var.mean(-1, keepdim=True)
    return rows - rows.mean(-2, keepdim=True)


def without_covariances(f_var: Tensor) -> Tensor:
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
    def forward(ctx: Any, covariance: Tensor) -> Tensor:
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
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
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


def gaussian_samples(f_mu: Tensor, f_var: Tensor, noise: Tensor) -> Tensor:
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
    shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None
) -> Tensor:
    """Draw normal numbers in the dtype of `like`, on the generator's device."""
    device = like.device if generator is None else generator.device
    return torch.randn(shape, generator=generator, device=device, dtype=like.dtype)
