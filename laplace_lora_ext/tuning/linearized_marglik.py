"""The evidence of the training data in the linearised model, at its own mode."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from laplace_lora_ext.linearized.model import LinearizedModel
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.tuning.evidence_search import maximize_linearized_evidence
from laplace_lora_ext.tuning.history import TuningHistory
from laplace_lora_ext.tuning.method import TuningMethod


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearizedMarglik(TuningMethod):
    """Maximise the evidence of the linearised model at its own mode.

    The mode is found anew for each prior precision. This helps where training has not reached a
    mode of the posterior; without weight decay it never does.

    Parameters
    ----------
    init_prior_prec, prior_structure, progress_bar
        of `TuningMethod`; the structure is "scalar" or "layerwise"
    train_loader : DataLoader, iterable or LinearizedModel
        the data of the fit. They pass through the model once, or not at all if you pass
        `la.linearize(train_loader)`
    n_steps : int, default=1000
        at most
    tolerance : float, default=1e-3
        stop when a step has changed the evidence by less, in nats; 0 takes all steps
    pooling : float, default=3.0
        for a layerwise prior: strength of a hyperprior that pulls each block's prior precision
        towards the scalar that the evidence prefers, as if the data had determined this many more
        directions of the block. With 0 each block follows its own evidence, which often raises its
        prior precision without bound

    Raises
    ------
    ValueError
        If `pooling` is negative, or the data are not those of the fit.

    Warns
    -----
    UserWarning
        If the evidence has not converged, or a mode is inexact.

    References
    ----------
    Antorán et al., "Adapting the linearised Laplace model evidence for modern deep learning",
    ICML 2022.
    """

    train_loader: Iterable[Any] | LinearizedModel
    n_steps: int = 1000
    tolerance: float = 1e-3
    pooling: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pooling(self.pooling)

    def _search(self, la: Posterior) -> TuningHistory:
        start = self._start(la).cpu()
        model = linearized(la, self.train_loader, self.progress_bar)
        scale = float(la._H_factor)
        constant = float(la.log_likelihood + scale * la.loss)
        history = maximize_linearized_evidence(
            partial(model.evidence, scale=scale, constant=constant),
            start,
            self.n_steps,
            self.tolerance,
            self.pooling,
            self.progress_bar,
        )
        la.prior_precision = history.prior_precision[-1]
        return history


def check_pooling(pooling: float) -> None:
    """Refuse a strength that is negative or not finite."""
    if not 0 <= pooling < math.inf:
        raise ValueError(f"pooling must be a number not below 0, not {pooling}.")


def linearized(
    la: Posterior,
    train_loader: Iterable[Any] | LinearizedModel,
    progress_bar: bool,
) -> LinearizedModel:
    """The linearised model of the data of the fit, whether or not it is made already."""
    if len(la.prior_precision) == la.n_params:
        raise ValueError('Linearised methods know the structures "scalar" and "layerwise".')
    if isinstance(train_loader, LinearizedModel):
        train_loader.check_training_data(la.n_data, float(la.loss))
        train_loader.check_prior_mean(la.prior_mean)
        return train_loader
    return la.linearize(train_loader, progress_bar=progress_bar)
