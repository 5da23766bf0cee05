"""Links: from mean m and covariance S of logits to log-probabilities."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laplace_lora_ext.messages import check_count
from laplace_lora_ext.predictive.moments import (
    NO_CLASS,
    Moments,
    alike,
    centre,
    gaussian_samples,
    standard_normal,
)

# At 0 a logistic function is as steep as the normal distribution function of variance 8
# / π.
_PROBIT = math.pi / 8

DEFAULT_LINK = "mean_field"
"""The link of all that chooses one by itself; a bare call of a posterior keeps the
host's."""

OF_DIFFERENCES = frozenset({"mean_field", "mc"})
"""Links that only see differences of logits, as a softmax does."""


def probit(moments: Moments) -> Tensor:
    """Shrink each logit by its own variance: `softmax(m_k / √(1 + π/8 S_kk))`."""
    f_mu, f_var = moments
    variances = f_var.diagonal(dim1=-2, dim2=-1)
    shrunk = f_mu / (1 + _PROBIT * variances).sqrt()
    return shrunk.log_softmax(-1)


def softmax_samples(f_mu: Tensor, f_var: Tensor, noise: Tensor) -> Tensor:
    """Draw log-probabilities `(S, B, C)`, by noise as for `gaussian_samples`.

    Covariances that say the same of all differences of two logits draw the same.
    """
    samples = gaussian_samples(f_mu, centre(f_var), noise)
    return samples.log_softmax(-1)


def mean_field(moments: Moments) -> Tensor:
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
    if moments.classes is None:
        log_p = _shrunk_by_pairs(moments)
    else:
        log_p = _shrunk_by_groups(moments, moments.classes)
    # The p_k above do not sum to 1 for three classes or more: the last step divides by
    # their sum.
    return log_p.log_softmax(-1)


def _shrunk_by_pairs(moments: Moments) -> Tensor:
    """Compute the p_k of `mean_field`, as logarithms, from all differences."""
    f_mu, f_var = moments
    variance = f_var.diagonal(dim1=-2, dim2=-1)
    of_both = variance[..., :, None] + variance[..., None, :]
    # Rounding can leave a variance a little below 0.
    of_difference = (of_both - f_var - f_var.mT).clamp_min(0)
    above = f_mu[..., None, :] - f_mu[..., :, None]
    shrunk = above / (1 + _PROBIT * of_difference).sqrt()
    return -torch.logsumexp(shrunk, dim=-1)


def _shrunk_by_groups(moments: Moments, classes: Tensor) -> Tensor:
    """Compute the same from sums over groups of classes that are `alike`.

    A class i of a group shrinks its differences from all classes j of another by one
    factor s. So a sum over them separates:

        Σ_j exp(-(m_i - m_j) s) = exp(-m_i s) Σ_j exp(m_j s)

    With C classes and k contrasts these are C (k + 2) numbers, not C². A search over a
    grid would take seconds a text of 150 classes otherwise.
    """
    f_mu = moments.f_mu
    groups, variances, covariances = alike(moments.covariance, classes, f_mu.shape[-1])
    of_both = variances[:, :, None] + variances[:, None, :]
    of_difference = (of_both - covariances - covariances.mT).clamp_min(0)
    factors = (1 + _PROBIT * of_difference).rsqrt()  # (B, k + 2, k + 2)

    # Listed classes are alone in their groups; the last group has all others. What is
    # as low as this adds nothing to a sum, and unlike an infinite number no nan to a
    # gradient.
    lowest = torch.finfo(f_mu.dtype).min
    n_listed = classes.shape[1]
    listed = f_mu.gather(1, classes.clamp_min(0))
    listed = listed.masked_fill(classes == NO_CLASS, lowest)
    others = f_mu.masked_fill(groups < n_listed, lowest)
    # Logarithms of Σ_j exp(m_j s): by the group of i, and that of j.
    of_listed = listed[:, None] * factors[:, :, :-1]
    of_others = torch.logsumexp(others[:, None] * factors[:, :, -1:], 2, keepdim=True)
    sums = torch.cat([of_listed, of_others], dim=2)
    # One over p_i adds up exp(-m_i s) times these sums, over the groups of j.
    of_listed = torch.logsumexp(sums[:, :-1] - listed[..., None] * factors[:, :-1], 2)
    of_others = torch.logsumexp(
        sums[:, -1, :, None] - f_mu[:, None] * factors[:, -1, :, None], 1
    )
    in_places = of_listed.gather(1, groups.clamp_max(n_listed - 1))
    return -torch.where(groups < n_listed, in_places, of_others)


LINKS = ("probit", "mean_field", "mc")
"""Links of this library; bridges are the host's."""


def log_probabilities(
    moments: Moments,
    link_approx: str,
    n_samples: int = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return log-probabilities `(B, C)` of classes, by one of `LINKS`.

    "mc" gives all examples of a batch the same noise, `n_samples` times.
    """
    if link_approx == "mc":  # many samples give the exact integral
        noise = shared_noise(moments.f_mu, n_samples, generator)
        log_p = softmax_samples(moments.f_mu, moments.f_var, noise)
        return log_p.logsumexp(0) - math.log(len(noise))
    return mean_field(moments) if link_approx == "mean_field" else probit(moments)


def shared_noise(
    f_mu: Tensor, n_samples: int, generator: torch.Generator | None
) -> Tensor:
    """Draw `(S, 1, C)` standard normal numbers, in the host's order."""
    check_count("n_samples", n_samples)
    n_outputs = f_mu.shape[-1]
    noise = standard_normal((n_outputs, n_samples), f_mu, generator)
    return noise.T[:, None]
