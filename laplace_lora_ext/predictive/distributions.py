"""Both predictives: Gaussian logits of the linearised model, and the network with drawn weights."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import one_hot

from laplace_lora_ext.messages import check_counts
from laplace_lora_ext.models.locks import exclusive, without_autocast
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.models.weights import Values, called_with, check_in_place
from laplace_lora_ext.passes.recording import Directions, every_output
from laplace_lora_ext.predictive.links import OF_DIFFERENCES, shared_noise
from laplace_lora_ext.predictive.moments import Moments, gaussian_samples, uncorrelated


@exclusive
def predictive_moments(
    la: Posterior, x: Any, *, joint: bool = False
) -> Moments | tuple[torch.Tensor, torch.Tensor]:
    """Mean `(B, C)` and covariance `(B, C, C)` of a batch's logits, without link or noise.

    With `joint` a pair of tensors, `(B * C,)` and `(B * C, B * C)`.
    """
    moments = predictive_distribution(la, x, joint)
    return moments if joint else Moments(*moments)


def predictive_distribution(
    la: Posterior, X: Any, joint: bool = False, diagonal_output: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the host asks for: mean and covariance, or variances, of a batch or of `Moments`."""
    f_mu, f_var = _moments(la, X, joint)
    if joint:
        f_mu = f_mu.flatten()
    elif diagonal_output:
        f_var = f_var.diagonal(dim1=-2, dim2=-1)
    return f_mu, f_var


def moments_for(la: Posterior, X: Any, link_approx: str) -> Moments:
    """Moments of a batch, or `Moments`, as a link needs them, by as few backward passes as it can.

    Links that only see differences of logits get the C - 1 from the most probable logit (one where
    there are two classes). All other links get all logits, by C passes.
    """
    sees_all = link_approx not in OF_DIFFERENCES or la.predicted_likelihood.is_gaussian
    if sees_all or la.n_outputs < 2 or isinstance(X, Moments):
        return Moments(*predictive_distribution(la, X))
    return _of_contrasts(la, X)


def _of_contrasts(la: Posterior, X: Any) -> Moments:
    """Covariances of how far the other logits are from the most probable one, at their places."""

    def ranked(logits: torch.Tensor) -> torch.Tensor:
        places = logits.argsort(dim=-1, descending=True, stable=True)
        return one_hot(places, logits.shape[-1]).transpose(0, 1).to(logits)  # (C, B, C)

    def contrasts(logits: torch.Tensor) -> torch.Tensor:
        return ranked(logits)[1:] - ranked(logits)[:1]

    f_mu, f_var = _moments(la, X, directions=contrasts)
    others = ranked(f_mu.detach())[1:].transpose(0, 1).to(f_var)  # (B, C - 1, C)
    with torch.autocast(f_var.device.type, enabled=False):
        return Moments(f_mu, others.mT @ f_var @ others)


def _moments(
    la: Posterior, X: Any, joint: bool = False, directions: Directions = every_output
) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(X, Moments):
        if joint:
            raise ValueError("Moments hold no covariance between examples: pass the inputs.")
        # Some links change them in place.
        f_mu, f_var = X.to(la.model.device, la.blocks[0].statistics_dtype, copy=True)
    else:
        la.check_model()
        with torch.set_grad_enabled(la.enable_backprop):
            f_mu, f_var = la.moments(X, joint, directions)
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


def drawn_weights(la: Posterior, generator: torch.Generator | None) -> Values:
    """One draw of the LoRA weights."""
    check_in_place(la.blocks, "A draw of the weights")
    weights = [block.weight for block in la.blocks]
    parts = la.sample(1, generator)[0].split([weight.numel() for weight in weights])
    return [part.reshape(w.shape).to(w) for part, w in zip(parts, weights, strict=True)]


def network_samples(
    la: Posterior,
    X: Any,
    n_samples: int = 100,
    generator: torch.Generator | None = None,
    **model_kwargs: Any,
) -> torch.Tensor:
    """Logits `(S, B, C)` under draws of the weights."""
    if isinstance(X, Moments):
        raise ValueError('Moments hold no inputs: pass a batch for pred_type="nn".')
    check_counts(n_samples=n_samples)
    la.check_model()
    found = []
    for _ in range(n_samples):
        drawn = drawn_weights(la, generator)
        with la.model.prepared(), torch.set_grad_enabled(la.enable_backprop):
            found.append(called_with(la.model, la.blocks, drawn, X, **model_kwargs))
    return torch.stack(found)


def mean_probabilities(la: Posterior, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Mean over draws of the weights of the softmax probabilities, `(B, C)`."""
    return network_samples(la, *args, **kwargs).softmax(-1).mean(0)
