"""What a search for a regression's noise reads off the curvature."""

from __future__ import annotations

import math
from copy import copy
from typing import Any

import torch

from laplace_lora_ext.curvature.matrix import trace_of
from laplace_lora_ext.processes.exchange import of_first


def n_determined(la: Any) -> float:
    """Count the parameters that data determine, not the prior: `Σ e / (e + λ)`.

    The sum is over the eigenvalues e of the curvature, at the present prior precision λ
    and noise. It is the derivative of `log det(c H + λ)` in log c.

    References
    ----------
    MacKay, "Bayesian interpolation", Neural Computation 4 (1992).
    """
    scaled = copy(la)
    noise = la.sigma_noise.detach()
    with torch.enable_grad():
        log_factor = torch.zeros(
            (), device=noise.device, dtype=torch.float64, requires_grad=True
        )
        # Multiplies the curvature by the factor.
        scaled.sigma_noise = noise * (-log_factor / 2).exp()
        log_det = scaled.log_det_posterior_precision
        (number,) = torch.autograd.grad(log_det, log_factor)
    return number.item()


def mean_squared_slope(la: Any) -> float:
    """Return tr(H) / (N C) of a regression, how outputs vary with a weight; 1 for 0."""
    return trace_of(la.H) / (la.n_data * la.n_outputs) or 1.0


def unit_of_priors(la: Any) -> float:
    """Return the prior precision under which an output varies by 1, of a regression.

    Multiplied by 1 / sigma_noise² it is the same prior whatever unit the targets have.
    """
    # Ranks may differ in the last digit.
    return of_first(mean_squared_slope(la) / float(la.temperature))


def noise_of_residuals(la: Any) -> float:
    """Find the noise that training residuals show, at the prior of noise 1.

    Of n C residuals, the fit has made as many smaller as it has parameters that the
    data determine, γ. So the best estimate of the variance is `Σ r² / (n C - γ)`
    (MacKay 1992, as for `n_determined`), where `Σ r²` is twice the loss of a Gaussian
    with variance 1.

    A `ValueError` if the data determine as many parameters as there are residuals, or
    there is no error.
    """
    squares = 2 * la.loss.item()
    n_residuals = la.n_data * la.n_outputs
    n_free = n_residuals - n_determined(la)
    instead = 'let held-out data choose, by method="gridsearch" or "second_training".'
    if n_free <= 0:
        raise ValueError(
            f"The training data determine {n_residuals - n_free:.0f} parameters, and "
            f"have {n_residuals} targets, which leaves none to tell the noise: "
            f"{instead}"
        )
    if squares == 0:
        raise ValueError(
            "The model predicts its training targets without any error, which leaves "
            f"no noise to choose: {instead}"
        )
    return of_first(math.sqrt(squares / n_free))
