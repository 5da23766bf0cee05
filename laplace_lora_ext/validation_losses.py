"""Negative log-likelihoods of Gaussian logits, which a prior precision is chosen by."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from laplace_lora_ext.mean_field import mean_field_log_softmax
from laplace_lora_ext.predictive_statistics import Moments
from laplace_lora_ext.square_root import square_root

NegativeLogLikelihood = Callable[[Moments, torch.Tensor, "torch.Generator | None"], torch.Tensor]
"""Of N examples with their targets, `(N,)`; the generator seeds what is sampled."""


def sampled_categorical_loss(n_samples: int) -> NegativeLogLikelihood:
    """Minus the log of the mean probability of each target over reparametrised logits."""

    def loss(
        moments: Moments, targets: torch.Tensor, generator: torch.Generator | None
    ) -> torch.Tensor:
        f_mu, f_var = moments
        device = f_mu.device if generator is None else generator.device
        noise = torch.randn(
            n_samples, *f_mu.shape, 1, generator=generator, device=device, dtype=f_mu.dtype
        )
        logits = f_mu + (square_root(f_var) @ noise.to(f_mu.device)).squeeze(-1)
        index = targets.expand(n_samples, -1)[..., None]
        log_probabilities = logits.log_softmax(-1).gather(-1, index).squeeze(-1)
        return math.log(n_samples) - log_probabilities.logsumexp(0)

    return loss


def probit_categorical_loss(
    moments: Moments, targets: torch.Tensor, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Cross-entropy of logits that the probit approximation has scaled, `(N,)`."""
    f_mu, f_var = moments
    variances = f_var.diagonal(dim1=1, dim2=2)
    logits = f_mu / (1 + math.pi / 8 * variances).sqrt()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def mean_field_categorical_loss(
    moments: Moments, targets: torch.Tensor, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Cross-entropy under the mean-field approximation, `(N,)`."""
    return torch.nn.functional.nll_loss(mean_field_log_softmax(*moments), targets, reduction="none")


def gaussian_loss(sigma_noise: torch.Tensor) -> NegativeLogLikelihood:
    """Minus the log-density of targets `(N, C)` under the predictive and independent noise."""

    def loss(
        moments: Moments, targets: torch.Tensor, generator: torch.Generator | None
    ) -> torch.Tensor:
        f_mu, f_var = moments
        noise = sigma_noise.to(f_var).square() * torch.eye(f_mu.shape[1]).to(f_var)
        predictive = torch.distributions.MultivariateNormal(f_mu, f_var + noise)
        return -predictive.log_prob(targets.to(f_mu))

    return loss
