"""What decisions need: probabilities, labels, bounds, and how much more data would help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from laplace_lora_ext.models.locks import exclusive
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.predictive.glm import moments_of_differences
from laplace_lora_ext.predictive.links import (
    OF_DIFFERENCES,
    own_links,
    shared_noise,
    softmax_samples,
)
from laplace_lora_ext.predictive.moments import Moments


@dataclass(frozen=True)
class Prediction:
    """Predictions for B examples and C classes, with entropies in nats.

    Attributes
    ----------
    probabilities : torch.Tensor
        `(B, C)`
    labels : torch.Tensor
        `(B,)`, the most probable class
    total_entropy : torch.Tensor
        `(B,)`, entropy of the probabilities averaged over draws of the posterior
    aleatoric_entropy : torch.Tensor
        `(B,)`, mean entropy of the draws: doubt that all draws share
    epistemic_entropy : torch.Tensor
        `(B,)`, the difference: mutual information of label and weights, the doubt that more
        training data would reduce
    label_variance : torch.Tensor
        `(B,)`, how much the probability of `labels` varies over the draws

    References
    ----------
    Depeweg et al., "Decomposition of uncertainty in Bayesian deep learning for efficient and
    risk-sensitive learning", ICML 2018.
    """

    probabilities: torch.Tensor
    labels: torch.Tensor
    total_entropy: torch.Tensor
    aleatoric_entropy: torch.Tensor
    epistemic_entropy: torch.Tensor
    label_variance: torch.Tensor

    @classmethod
    def of(cls, moments: Moments, probabilities: torch.Tensor, noise: torch.Tensor) -> Prediction:
        """From a link's probabilities, and `(S, 1, C)` normal noise to draw logits with."""
        labels = probabilities.argmax(-1)
        drawn = softmax_samples(*moments, noise).exp()
        total = torch.special.entr(drawn.mean(0)).sum(-1)
        aleatoric = torch.special.entr(drawn).sum(-1).mean(0)
        of_label = drawn.take_along_dim(labels[None, :, None], dim=-1)[..., 0]
        # Entropy is concave, so only rounding can make the difference negative.
        epistemic = (total - aleatoric).clamp_min(0)
        return cls(
            probabilities, labels, total, aleatoric, epistemic, of_label.var(0, correction=0)
        )


@exclusive
def predict(
    la: Posterior,
    x: Any,
    link_approx: str = "mean_field",
    n_samples: int = 1000,
    generator: torch.Generator | None = None,
) -> Prediction:
    """Class probabilities, and what else a decision needs, with `pred_type="glm"`.

    Parameters
    ----------
    x : Mapping, torch.Tensor or Moments
        as for a call
    link_approx : {"mean_field", "probit", "mc"}
        link for the probabilities
    n_samples : int, default=1000
        draws of the logits, for entropies and variances
    generator : torch.Generator, optional

    Returns
    -------
    Prediction

    Raises
    ------
    ValueError
        For a likelihood without classes, or another link.
    """
    if la._predicted_likelihood.is_gaussian:
        raise ValueError(f"{la.likelihood} predicts numbers: use la(x), for mean and variance.")
    links = own_links(n_samples, generator)
    if link_approx not in links:
        raise ValueError(f"link_approx {link_approx!r} is none of {list(links)}.")
    if link_approx in OF_DIFFERENCES:
        moments = moments_of_differences(la, x)
    else:
        moments = Moments(*la._glm_predictive_distribution(x))
    with torch.autocast(la._device.type, enabled=False):
        probabilities = links[link_approx](*moments).exp()
        noise = shared_noise(moments.f_mu, n_samples, generator)
        prediction = Prediction.of(moments, probabilities, noise)
    la._agreement.add(prediction.probabilities, link_approx)
    return prediction


def predict_proba(la: Posterior, x: Any, link_approx: str = "mean_field") -> np.ndarray:
    """Class probabilities `(B, C)` for scikit-learn's tools, the same in every call."""
    prediction = predict(la, x, link_approx, generator=torch.Generator())
    return prediction.probabilities.detach().cpu().numpy()


@exclusive
def lower_bound(la: Posterior, x: Any, k: float = 1.0) -> torch.Tensor:
    """Mean less `k` standard deviations of each output, `(B, C)`.

    A policy that is trained on the mean reward seeks out texts that the reward model knows little
    about; this bound rates them low.

    Raises
    ------
    ValueError
        For classification.
    """
    if not la._predicted_likelihood.is_gaussian:
        raise ValueError("Classes have no lower bound; rewards and regressions do.")
    f_mu, f_var = la._glm_predictive_distribution(x)
    return f_mu - k * f_var.diagonal(dim1=-2, dim2=-1).sqrt()
