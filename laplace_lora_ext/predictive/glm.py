"""The linearised predictive: Gaussian logits of a batch, and draws of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from laplace_lora_ext.models.locks import exclusive
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.precision import without_autocast
from laplace_lora_ext.predictive.links import shared_noise
from laplace_lora_ext.predictive.moments import Moments, uncorrelated
from laplace_lora_ext.predictive.sampling import gaussian_samples


@exclusive
def predictive_moments(
    la: Posterior, x: Any, *, joint: bool = False
) -> Moments | tuple[torch.Tensor, torch.Tensor]:
    """Mean `(B, C)` and covariance `(B, C, C)` of a batch's logits, without link or noise.

    With `joint` a pair of tensors, `(B * C,)` and `(B * C, B * C)`.
    """
    moments = la._glm_predictive_distribution(x, joint)
    return moments if joint else Moments(*moments)


def predictive_distribution(
    la: Posterior, X: Any, joint: bool = False, diagonal_output: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the host asks for: mean and covariance, or variances, of a batch or of `Moments`."""
    f_mu, f_var = _checked(la, X, joint)
    if joint:
        f_mu = f_mu.flatten()
    elif diagonal_output:
        f_var = f_var.diagonal(dim1=-2, dim2=-1)
    return f_mu, f_var


def moments_of_differences(la: Posterior, X: Any) -> Moments:
    """Moments for links that only see differences of logits: those from the first one.

    The covariance is that of `f_j - f_0`. It takes C - 1 backward passes in place of C, and one
    alone where there are two classes.
    """
    C = la.n_outputs
    if isinstance(X, Moments) or C < 2 or la._predicted_likelihood.is_gaussian:
        return Moments(*_checked(la, X))
    contrasts = torch.eye(C)[1:] - torch.eye(C)[0]
    f_mu, f_var = _checked(la, X, directions=contrasts)
    return Moments(f_mu, pad(f_var, (1, 0, 1, 0)))


def _checked(
    la: Posterior, X: Any, joint: bool = False, directions: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(X, Moments):
        if joint:
            raise ValueError("Moments hold no covariance between examples: pass the inputs.")
        # Some links change them in place.
        f_mu, f_var = X.to(la._device, la._dtype, copy=True)
    else:
        la._check_model()
        with torch.set_grad_enabled(la.enable_backprop):
            f_mu, f_var = la._moments(X, joint, directions)
    if not torch.isfinite(f_var).all():
        raise ValueError("The predictive covariance is not finite: check the prior precision.")
    la._agreement.expect(f_mu)
    return f_mu, f_var


@exclusive
@without_autocast
def functional_samples(
    la: Posterior,
    f_mu: torch.Tensor,
    f_var: torch.Tensor,
    n_samples: int,
    diagonal_output: bool = False,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Logits `(S, B, C)`, drawn from Gaussians."""
    if diagonal_output:
        f_var = uncorrelated(f_var)
    # Unlike the host's Cholesky factor, a symmetric root of a singular covariance exists.
    return gaussian_samples(f_mu, f_var, shared_noise(f_mu, n_samples, generator))
