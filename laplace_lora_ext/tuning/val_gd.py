"""Gradient descent on the loss of validation data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from laplace_lora_ext.likelihoods import Link
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.predictive.links import mean_field, probit, sampled
from laplace_lora_ext.predictive.moments import Moments
from laplace_lora_ext.predictive.statistics import PredictiveStatistics
from laplace_lora_ext.tuning.history import TuningHistory
from laplace_lora_ext.tuning.loss_search import NegativeLogLikelihood, minimize_validation_loss
from laplace_lora_ext.tuning.method import TuningMethod

_SMOOTH: dict[str, Link] = {"probit": probit, "mean_field": mean_field}


@dataclass(frozen=True, kw_only=True, eq=False)
class ValGD(TuningMethod):
    """Follow the gradient of the validation data's negative log-likelihood, for "lowrank_kron".

    Parameters
    ----------
    init_prior_prec, prior_structure, progress_bar
        as for `TuningMethod`
    val_loader : DataLoader, iterable or PredictiveStatistics
        validation data with labels. They pass through the model only once, and with their
        statistics not at all
    link_approx : {"mc", "probit", "mean_field"}
        link for the predictions to score: choose the one that you predict with
    n_samples : int, default=100
        samples of the logits, with "mc"
    n_steps : int, default=1000
    lr : float, default=0.1
        Adam's first step in the logarithm of the prior precision
    batch_size : int, default=4
        examples in a minibatch
    generator : torch.Generator, optional
        for minibatches and samples

    Raises
    ------
    ValueError
        If the data are empty, have no labels, or are statistics of another fit.
    NotImplementedError
        For another structure than "lowrank_kron".

    References
    ----------
    Yang et al. (ICLR 2024), algorithm 3.
    """

    val_loader: Iterable[Any] | PredictiveStatistics
    link_approx: str = "mc"
    n_samples: int = 100
    n_steps: int = 1000
    lr: float = 0.1
    batch_size: int = 4
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.link_approx not in ("mc", *_SMOOTH):
            raise ValueError(
                'method="val_gd" needs one of the links "mc", "probit" and "mean_field", not '
                f"{self.link_approx!r}."
            )

    def _search(self, la: Posterior) -> TuningHistory:
        logarithm = self._start(la).log().requires_grad_()
        statistics: PredictiveStatistics | None = la.statistics_of(
            self.val_loader, self.progress_bar
        )
        if statistics is None:
            raise NotImplementedError(
                'method="val_gd" needs hessian_structure="lowrank_kron": use "gridsearch" instead.'
            )
        with torch.autocast(statistics.f_mu.device.type, enabled=False):  # of the backward pass
            history = minimize_validation_loss(
                statistics,
                logarithm,
                predictive_loss(la, self.link_approx, self.n_samples),
                self.n_steps,
                self.lr,
                self.batch_size,
                self.generator,
                self.progress_bar,
            )
        la.prior_precision = history.prior_precision[history.objective.argmin()]
        return history


def predictive_loss(la: Posterior, link_approx: str, n_samples: int) -> NegativeLogLikelihood:
    """Negative log-density of each target under Gaussian logits and, for classes, a link."""

    def loss(
        moments: Moments, targets: torch.Tensor, generator: torch.Generator | None
    ) -> torch.Tensor:
        link = _SMOOTH.get(link_approx) or sampled(n_samples, generator)
        return la.trained_likelihood.predictive_loss(link, moments, targets, la.sigma_noise)

    return loss
