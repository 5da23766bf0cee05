"""Links: from mean m and covariance S of logits to log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from laplace_lora_ext.messages import check_counts
from laplace_lora_ext.predictive.moments import (
    centred,
    gaussian_samples,
    standard_normal,
)

# At 0 a logistic function is as steep as the normal distribution function of variance 8
# / π.
_PROBIT = math.pi / 8

Link = Callable[[Tensor, Tensor], Tensor]
"""Turns mean and covariance into log-probabilities `(B, C)`."""

DEFAULT_LINK = "mean_field"
"""The link of all that chooses one by itself; a bare call of a posterior keeps the
host's."""

OF_DIFFERENCES = frozenset({"mean_field", "mc"})
"""Links that only see differences of logits, as a softmax does."""


def probit(
    f_mu: Tensor,
    f_var: Tensor,
) -> Tensor:
    """Shrink each logit by its own variance: `softmax(m_k / √(1 + π/8 S_kk))`."""
    variances = f_var.diagonal(dim1=-2, dim2=-1)
    shrunk = f_mu / (1 + _PROBIT * variances).sqrt()
    return shrunk.log_softmax(-1)


def monte_carlo(
    f_mu: Tensor,
    f_var: Tensor,
    noise: Tensor,
) -> Tensor:
    """Average probabilities over samples of logits; many give the exact integral.

    `noise` holds standard normal numbers, as for `gaussian_samples`.
    """
    log_p = softmax_samples(f_mu, f_var, noise)
    return log_p.logsumexp(0) - math.log(len(noise))


def softmax_samples(
    f_mu: Tensor,
    f_var: Tensor,
    noise: Tensor,
) -> Tensor:
    """Draw log-probabilities `(S, B, C)`, by noise as for `gaussian_samples`.

    Covariances that say the same of all differences of two logits draw the same.
    """
    samples = gaussian_samples(f_mu, centred(f_var), noise)
    return samples.log_softmax(-1)


def mean_field(
    f_mu: Tensor,
    f_var: Tensor,
) -> Tensor:
    """Approximate the logarithm of the mean softmax of Gaussian logits by mean fields.

    A softmax only depends on differences of logits: `p_k = 1 / Σ_j exp(-(f_k - f_j))`.
    Each difference is Gaussian. We replace it by its mean, shrunk by its own variance
    just as the probit approximation shrinks the one logit of two classes:

        p_k ∝ 1 / Σ_j exp(-(m_k - m_j) / √(1 + π/8 (S_kk + S_jj - 2 S_kj)))

    What all logits of an example share drops out, as in the exact integral. For two
    classes this is the probit approximation, and keeps the most probable class. Without
    variance it is the softmax.

    References
    ----------
    Lu, Ie & Sha, "Mean-field approximation to Gaussian-softmax integral with
    application to uncertainty estimation", arXiv:2006.07584 (2020). MacKay, "The
    evidence framework applied to classification networks", Neural Computation 4 (1992),
    for two classes.
    """
    variance = f_var.diagonal(dim1=-2, dim2=-1)
    of_both = variance[..., :, None] + variance[..., None, :]
    of_difference = of_both - f_var - f_var.mT
    difference = f_mu[..., :, None] - f_mu[..., None, :]
    # Rounding can leave a variance a little below 0.
    of_difference = of_difference.clamp_min(0)
    shrunk = difference / (1 + _PROBIT * of_difference).sqrt()
    log_p = -torch.logsumexp(-shrunk, dim=-1)
    # The p_k above do not sum to 1 for three classes or more: the last step divides by
    # their sum.
    return log_p.log_softmax(-1)


def sampled(
    n_samples: int,
    generator: torch.Generator | None,
) -> Link:
    """Make a link of samples, each example's own, drawn anew in every call."""

    def link(
        f_mu: Tensor,
        f_var: Tensor,
    ) -> Tensor:
        noise = standard_normal((n_samples, *f_mu.shape), f_mu, generator)
        return monte_carlo(f_mu, f_var, noise)

    return link


def own_links(
    n_samples: int,
    generator: torch.Generator | None,
) -> dict[str, Link]:
    """Make this library's links by name; "mc" gives a batch the same noise."""

    def sampled_alike(
        f_mu: Tensor,
        f_var: Tensor,
    ) -> Tensor:
        noise = shared_noise(f_mu, n_samples, generator)
        return monte_carlo(f_mu, f_var, noise)

    return {"probit": probit, "mean_field": mean_field, "mc": sampled_alike}


def shared_noise(
    f_mu: Tensor, n_samples: int, generator: torch.Generator | None
) -> Tensor:
    """Draw `(S, 1, C)` standard normal numbers, in the host's order."""
    check_counts(n_samples=n_samples)
    n_outputs = f_mu.shape[-1]
    noise = standard_normal((n_outputs, n_samples), f_mu, generator)
    return noise.T[:, None]
