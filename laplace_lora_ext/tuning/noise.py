"""What a search for a regression's noise reads off the curvature."""

from __future__ import annotations

import math
from typing import Any

import torch
from laplace.utils.matrix import KronDecomposed

from laplace_lora_ext.processes.exchange import of_first
from laplace_lora_ext.tuning.method import Tunable

# A prior precision beside which all curvature is small; float32 holds it.
_WITHOUT_DATA = 1e30


def n_determined(la: Tunable) -> float:
    """Count the parameters that data determine, not the prior: `Σ e / (e + λ)`.

    The sum is over the eigenvalues e of the curvature, at the present prior precision λ
    and noise. It is the derivative of `log det(c H + λ)` in log c.

    References
    ----------
    MacKay, "Bayesian interpolation", Neural Computation 4 (1992).
    """
    P: Any = la.posterior_precision
    if isinstance(P, KronDecomposed):  # through whose determinant no gradient goes
        return _of_factors(P)
    noise = la.sigma_noise.detach()
    with torch.enable_grad():
        log_factor = torch.zeros(
            (), device=noise.device, dtype=torch.float64, requires_grad=True
        )
        # Multiplies the curvature by the factor.
        la.sigma_noise = noise * (-log_factor / 2).exp()
        (number,) = torch.autograd.grad(la.log_det_posterior_precision, log_factor)
    la.sigma_noise = noise
    return number.item()


def _of_factors(P: KronDecomposed) -> float:
    """Sum `e / (e + λ)` over the products e of the eigenvalues of a block's factors."""
    number = 0.0
    for factors, delta in zip(P.eigenvalues, P.deltas, strict=True):
        products = torch.ones(1, dtype=torch.float64, device=delta.device)
        for values in factors:
            products = torch.outer(products, values.double()).flatten()
        of_data = products / (products + delta.double())
        number += of_data.sum().item()
    return number


def unit_of_priors(la: Tunable) -> float:
    """Find the prior precision that says of outputs as much as noise of 1.

    That is the mean squared slope of an output in the weights, over the training data:
    the trace of the curvature, divided by how many numbers it was summed over.
    Multiplied by 1 / sigma_noise² it is the same prior whatever unit the targets have.
    """
    before = la.hyperparameters
    la.sigma_noise = 1.0
    la.prior_precision = _WITHOUT_DATA
    trace = n_determined(la) * _WITHOUT_DATA  # Σ e / (e + λ), where λ is much larger
    la.hyperparameters = before
    # Ranks may differ in the last digit.
    unit = of_first(trace / (la.n_data * la.n_outputs))
    return unit if unit > 0 else 1.0


def noise_of_residuals(la: Tunable) -> float:
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
