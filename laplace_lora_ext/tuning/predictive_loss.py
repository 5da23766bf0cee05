"""The loss of predictions that a prior precision gives."""

from __future__ import annotations

import torch

from laplace_lora_ext.likelihoods import Link
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.predictive.links import mean_field, probit, sampled
from laplace_lora_ext.predictive.moments import Moments
from laplace_lora_ext.tuning.loss_search import NegativeLogLikelihood

_SMOOTH: dict[str, Link] = {"probit": probit, "mean_field": mean_field}
_SAMPLED = "mc"


def check_link(link_approx: str) -> None:
    """Refuse a link without a smooth loss."""
    if link_approx not in (*_SMOOTH, _SAMPLED):
        raise ValueError(
            'method="val_gd" and "linearized_loo" need one of the links "mc", "probit" and '
            f'"mean_field", not {link_approx!r}.'
        )


def predictive_loss(la: Posterior, link_approx: str, n_samples: int) -> NegativeLogLikelihood:
    """Negative log-density of each target under Gaussian logits and, for classes, a link."""

    def loss(
        moments: Moments, targets: torch.Tensor, generator: torch.Generator | None
    ) -> torch.Tensor:
        link = _SMOOTH.get(link_approx) or sampled(n_samples, generator)
        return la.trained_likelihood.predictive_loss(link, moments, targets, la.sigma_noise)

    return loss
