"""Gaussian logits: moments of all or of contrasts, and samples of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

MOST = 8
"""Contrasts that are computed unless more are asked for: each takes a backward pass."""

# Classes are left out that have less probability than this all together, at this
# temperature: a posterior makes a model less sure.
_LEFT_OUT = 1e-3
_TEMPERATURE = 2.0

NO_CLASS = -1
"""In the place of a class, where an example needs fewer contrasts than another."""


@dataclass(frozen=True, eq=False)
class Moments:
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

    def semidefinite(self) -> Moments:
        """Return the nearest covariances without negative eigenvalues."""
        root = square_root(self.f_var)
        return Moments(self.f_mu, root @ root.mT)


def padded_to(covariance: Tensor, size: int) -> Tensor:
    """Add rows and columns of zeros to covariances, for contrasts that none needs."""
    n_missing = size - covariance.shape[-1]
    return pad(covariance, (0, n_missing, 0, n_missing))


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
        result = vectors @ (rotated * inverse) @ vectors.mT
        return result.to(gradient.dtype)


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


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw a seed for another generator; None draws from torch's own state."""
    device = None if generator is None else generator.device
    return int(torch.randint(2**31, (), generator=generator, device=device).item())


def standard_normal(
    shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None
) -> Tensor:
    """Draw normal numbers in the dtype of `like`, on the generator's device."""
    device = like.device if generator is None else generator.device
    return torch.randn(shape, generator=generator, device=device, dtype=like.dtype)


# --- contrasts ------------------------------------------------------------------------


@dataclass(frozen=True)
class Contrasts:
    """Chooses for each example which logits to compare with its most probable one.

    They are those of the next most probable classes, by the model's own probabilities:
    until what is left has less than 0.001 of the probability at twice the temperature,
    and at most 8. Nothing depends on the other examples of a batch.

    Parameters
    ----------
    n_contrasts : int, optional
        take this many, or all where there are fewer
    """

    n_contrasts: int | None = None

    def most(self, n_outputs: int) -> int:
        """Return how many contrasts an example may have."""
        return min(self.n_contrasts or MOST, n_outputs - 1)

    def classes(self, logits: Tensor) -> Tensor:
        """List each example's classes `(B, 1 + k)`, the most probable one first.

        k is `most`; where an example needs fewer, -1 follows.
        """
        n_outputs = logits.shape[-1]
        order = logits.argsort(dim=-1, descending=True, stable=True)
        classes = order[:, : 1 + self.most(n_outputs)]
        if self.n_contrasts is not None or classes.shape[1] == n_outputs:
            return classes
        probabilities = (logits / _TEMPERATURE).softmax(-1).gather(1, classes)
        # What is known of one class says the most of all others: one is always
        # compared.
        by_those_before = probabilities.cumsum(1)[:, 1:-1]
        is_needed = pad(by_those_before < 1 - _LEFT_OUT, (2, 0), value=True)
        return torch.where(is_needed, classes, NO_CLASS)

    def directions(self, logits: Tensor) -> Tensor:
        """Make the vectors `(k, B, C)` that a backward pass takes for each contrast.

        k is the largest number that an example needs.
        """
        classes = self.classes(logits)
        is_known = classes != NO_CLASS
        identity = torch.eye(logits.shape[-1]).to(logits)
        first, *others = identity[classes.clamp_min(0)].unbind(1)
        vectors = is_known[:, 1:].T[..., None] * (torch.stack(others) - first)
        return vectors[is_known[:, 1:].any(0)]


def alike(
    covariance: Tensor, classes: Tensor, n_outputs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tell from contrasts' covariances `(B, k, k)` those of all classes, by groups.

    The groups are the most probable class, each of k others alone, and all that are
    left. Returned are the number `(B, C)` of each class's group, the variances `(B, k +
    2)` of the groups' classes, and covariances `(B, k + 2, k + 2)` of two classes; on
    the diagonal, of two in the same group. Where an example needs fewer contrasts, some
    groups have no class.

    Those of the most probable class are 0. So they differ from those of the logits, but
    say the same of every difference of two that is known.

    The classes that are left are taken to be like the k known ones: their variance v is
    the mean of the known variances, and the covariance c of two of them the mean of the
    known covariances, cut to [0, v]. The covariance with a known class j is that of the
    best linear prediction from all known ones, c / (v + (k - 1) c) times the sum of
    row j. Nothing of this makes a negative eigenvalue.

    Parameters
    ----------
    covariance : torch.Tensor
        `(B, k, k)`, 0 where an example needs fewer contrasts
    classes : torch.Tensor
        `(B, 1 + k)`, what `Contrasts.classes` returned
    n_outputs : int
        C
    """
    n_examples, n_listed = classes.shape
    groups = classes.new_full((n_examples, n_outputs + 1), n_listed)
    columns = torch.where(classes == NO_CLASS, n_outputs, classes)
    places = torch.arange(n_listed, device=classes.device).expand_as(classes)
    groups = groups.scatter(1, columns, places)[:, :n_outputs]

    of_known = covariance.diagonal(dim1=1, dim2=2)
    n_known = (classes[:, 1:] != NO_CLASS).sum(1)
    sums = covariance.sum(2)
    trace = of_known.sum(1)
    variance = trace / n_known
    # Of one contrast nobody knows what it shares with another: logits alike share a
    # half.
    n_pairs = n_known * (n_known - 1)
    mean = (sums.sum(1) - trace) / n_pairs.clamp_min(1)
    shared = torch.where(n_pairs > 0, mean, variance / 2)
    # Where it is not between these two, no number of quantities can be alike.
    shared = shared.clamp_min(0).minimum(variance)
    of_sum = variance + (n_known - 1) * shared
    # Where nothing varies, nothing is shared either, and 0 / 0 is 0.
    smallest = torch.finfo(covariance.dtype).tiny
    weight = shared / of_sum.clamp_min(smallest)
    with_known = weight[:, None] * sums

    variances = torch.cat([pad(of_known, (1, 0)), variance[:, None]], dim=1)
    covariances = pad(covariance, (1, 1, 1, 1))
    covariances[:, -1, 1:-1] = covariances[:, 1:-1, -1] = with_known
    covariances[:, -1, -1] = shared
    return groups, variances, covariances


def completed(covariance: Tensor, classes: Tensor, n_outputs: int) -> Tensor:
    """Complete contrasts' covariances `(B, k, k)` to `(B, C, C)`.

    What they are is told by `alike`, which takes the same. C is `n_outputs`.
    """
    groups, variances, covariances = alike(covariance, classes, n_outputs)
    examples = torch.arange(len(groups), device=groups.device)[:, None, None]
    V = covariances[examples, groups[:, :, None], groups[:, None, :]]
    return V.diagonal_scatter(variances.gather(1, groups), dim1=1, dim2=2)
