"""What a call of a posterior returns: probabilities, or mean and covariance."""

from __future__ import annotations

from typing import Any

import torch
from laplace.baselaplace import ParametricLaplace

from laplace_lora_ext.models.locks import exclusive
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.predictive.amortization import amortized_moments
from laplace_lora_ext.predictive.glm import moments_for
from laplace_lora_ext.predictive.links import own_links
from laplace_lora_ext.predictive.moments import uncorrelated
from laplace_lora_ext.predictive.networks import functional_samples, mean_probabilities
from laplace_lora_ext.predictive.sampling import semidefinite


@exclusive
def posterior_predictive(
    la: Posterior,
    x: Any,
    pred_type: str = "glm",
    joint: bool = False,
    link_approx: str = "probit",
    n_samples: int = 100,
    diagonal_output: bool = False,
    generator: torch.Generator | None = None,
    fitting: bool = False,
    **model_kwargs: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Predict a batch, as the host does; `generator` seeds everything that is sampled.

    Parameters
    ----------
    x : Mapping, torch.Tensor or Moments
        inputs of B examples, or with "glm" their `Moments`. Labels in a mapping are ignored
    pred_type : {"glm", "nn", "amortized"}
        the host's, and "amortized": as "glm", with the variances that `amortize` has learnt
    joint, n_samples, diagonal_output, generator
        as for the host
    link_approx : {"probit", "mc", "mean_field", "runners_up", "bridge", "bridge_norm"}
        the host's, and "mean_field" (Lu, Ie & Sha, 2020): it takes the covariance between
        logits into account, as "mc" does, but draws no samples. "runners_up" is its like for many
        classes: it looks at the three most probable ones alone, by two backward passes
    fitting : bool, default=False
        reward modeling only: probabilities of preferences instead of rewards
    **model_kwargs
        for the model, with `pred_type="nn"`

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        probabilities `(B, C)`; for regression and rewards mean `(B, C)` and covariance
        `(B, C, C)`

    Notes
    -----
    Under a broad posterior over many classes, the mean probability ("mc", and sometimes "probit")
    can be largest for another class than the model's own, which costs accuracy. "mean_field" keeps
    to the model's class more often, and a larger prior precision cures it.
    """
    likelihood = la.trained_likelihood if fitting else la._predicted_likelihood
    if likelihood.is_gaussian and link_approx in {"mean_field", "runners_up"}:
        link_approx = "probit"  # numbers need no link, and the host must know its name
    if pred_type == "nn" and generator is not None:
        if not likelihood.is_gaussian:
            return mean_probabilities(la, x, n_samples, generator, **model_kwargs)
        samples = functional_samples(la, x, n_samples, generator, **model_kwargs)
        return samples.mean(0), samples.var(0)
    links = own_links(n_samples, generator)
    if pred_type == "amortized":
        x, pred_type = amortized_moments(la, x), "glm"
        if likelihood.is_gaussian or link_approx not in links:
            x = x._replace(f_var=semidefinite(x.f_var))
    if pred_type == "glm" and not likelihood.is_gaussian and link_approx in links:
        alone = diagonal_output and link_approx == "mc"
        f_mu, f_var = moments_for(la, x, "probit" if alone else link_approx)
        if alone:  # the variances of all logits
            f_var = uncorrelated(f_var)
        with torch.autocast(la._device.type, enabled=False):
            return links[link_approx](f_mu, f_var).exp()
    options = joint, link_approx, n_samples, diagonal_output, generator, fitting
    host: Any = ParametricLaplace.__call__
    return host(la, x, pred_type, *options, **model_kwargs)
