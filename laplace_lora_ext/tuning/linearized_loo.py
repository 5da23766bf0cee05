"""Leave-one-out cross-validation on the training data, in the linearised model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from laplace_lora_ext.linearized.model import LinearizedModel
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.tuning.history import TuningHistory
from laplace_lora_ext.tuning.linearized_marglik import (
    LinearizedMarglik,
    check_pooling,
    linearized,
)
from laplace_lora_ext.tuning.loss_search import draw_seed, search_line
from laplace_lora_ext.tuning.method import TuningMethod
from laplace_lora_ext.tuning.predictive_loss import check_link, predictive_loss


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearizedLOO(TuningMethod):
    """Minimise the negative log-likelihood of each training example given all the others.

    Each example is left out of the linearised model's posterior in turn, in closed form
    (Laplace-LOO). With a layerwise prior, `LinearizedMarglik` chooses the proportions and this loss
    one common factor.

    The Jacobians are taken at the trained weights, which have seen every example: one that is left
    out is still easier than a new one. `Agreement` has no such bias.

    Parameters
    ----------
    init_prior_prec, prior_structure, progress_bar
        of `TuningMethod`; several numbers in `init_prior_prec` are the proportions themselves
    train_loader, tolerance, pooling
        of `LinearizedMarglik`
    n_steps : int, default=1000
        at most, of each search
    link_approx : {"mean_field", "probit", "mc"}
        link of the scored predictions: choose the one that you predict with
    n_samples : int, default=100
        of the logits, with "mc"
    generator : torch.Generator, optional
        of these samples

    Raises
    ------
    ValueError
        If an option does not fit, the data are not those of the fit, or the loss is not a number.

    Warns
    -----
    UserWarning
        If the loss has no minimum in reach.

    References
    ----------
    Vehtari et al., "Bayesian leave-one-out cross-validation approximations for Gaussian latent
    variable models", JMLR 17 (2016).
    """

    train_loader: Iterable[Any] | LinearizedModel
    link_approx: str = "mean_field"
    n_samples: int = 100
    n_steps: int = 1000
    tolerance: float = 1e-3
    pooling: float = 3.0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pooling(self.pooling)
        check_link(self.link_approx)

    def _search(self, la: Posterior) -> TuningHistory:
        start = self._start(la).cpu()
        model = linearized(la, self.train_loader, self.progress_bar)
        if len(start) > 1 and not self._is_base:
            start = self._proportions(la, model)
        scale = float(la._H_factor)
        scored = predictive_loss(la, self.link_approx, self.n_samples)
        seed = draw_seed(self.generator) if self.link_approx == "mc" else 0

        def loss(prior_precision: torch.Tensor) -> float:
            moments = model.leave_one_out(prior_precision, scale)
            draws = torch.Generator().manual_seed(seed)  # the same for every prior precision
            return scored(moments, model.targets, draws).mean().item()

        history = search_line(loss, start, self.n_steps, self.progress_bar)
        la.prior_precision = history.prior_precision[history.objective.argmin()]
        return history

    def _proportions(self, la: Posterior, model: LinearizedModel) -> torch.Tensor:
        evidence = LinearizedMarglik(
            init_prior_prec=self.init_prior_prec,
            prior_structure=self.prior_structure,
            progress_bar=self.progress_bar,
            train_loader=model,
            n_steps=self.n_steps,
            tolerance=self.tolerance,
            pooling=self.pooling,
        )
        return evidence(la).prior_precision[-1]
