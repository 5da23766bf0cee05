"""Probabilities of Gaussian logits without samples."""

from __future__ import annotations

import math

import torch

_PROBIT = (
    math.pi / 8
)  # a logistic function has the slope of a normal distribution's of variance 8/π


def mean_field_log_softmax(f_mu: torch.Tensor, f_var: torch.Tensor) -> torch.Tensor:
    """Logarithm of the mean softmax of Gaussian logits, by a mean-field approximation.

    A softmax is one over a sum of exponentials of differences of logits:
    `p_k = 1 / Σ_j exp(-(f_k - f_j))`. Each difference is Gaussian, and is taken at its mean, shrunk
    by its own variance as the probit approximation shrinks the one logit of two classes:

        p_k ∝ 1 / Σ_j exp(-(m_k - m_j) / √(1 + π/8 (S_kk + S_jj - 2 S_kj)))

    What all logits of an example have in common plays no part, as in the exact integral. For two
    classes this is the probit approximation itself, and keeps the most probable class; without
    variance it is the softmax.

    Parameters
    ----------
    f_mu : torch.Tensor
        `(B, C)`, m
    f_var : torch.Tensor
        `(B, C, C)`, S

    Returns
    -------
    torch.Tensor
        `(B, C)`, normalised

    References
    ----------
    Lu, Ie & Sha, "Mean-field approximation to Gaussian-softmax integral with application to
    uncertainty estimation", arXiv:2006.07584 (2020).
    MacKay, "The evidence framework applied to classification networks", Neural Computation 4
    (1992), for two classes.
    """
    own = f_var.diagonal(dim1=-2, dim2=-1)
    variance = own[..., :, None] + own[..., None, :] - f_var - f_var.mT
    difference = f_mu[..., :, None] - f_mu[..., None, :]
    shrunk = difference / (1 + _PROBIT * variance.clamp_min(0)).sqrt()
    return (-torch.logsumexp(-shrunk, dim=-1)).log_softmax(-1)
