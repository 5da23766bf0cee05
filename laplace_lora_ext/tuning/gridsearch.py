"""The best prior precision of a grid on validation data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torchmetrics
from laplace.utils import validate

from laplace_lora_ext.messages import naming
from laplace_lora_ext.models.batches import named_batches
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.predictive.statistics import PredictiveStatistics
from laplace_lora_ext.processes.exchange import count, gathered
from laplace_lora_ext.processes.shards import Shard, is_new, rows
from laplace_lora_ext.tuning.history import TuningHistory
from laplace_lora_ext.tuning.loss_search import grid_of_priors, search_grid
from laplace_lora_ext.tuning.method import TuningMethod


@dataclass(frozen=True, kw_only=True, eq=False)
class GridSearch(TuningMethod):
    """Try a grid of scalars, or of factors of `init_prior_prec`, on validation data.

    Parameters
    ----------
    init_prior_prec : float or torch.Tensor
        several numbers are a base that the grid multiplies; a single number is ignored
    prior_structure, progress_bar
        as for `TuningMethod`
    val_loader : DataLoader, iterable or PredictiveStatistics
        validation data with labels. With "lowrank_kron" and "glm" they pass through the model only
        once, and with their statistics not at all
    pred_type : {"glm", "nn"}
        which predictions to score
    link_approx : {"probit", "mc", "mean_field", "bridge", "bridge_norm"}, optional
        by default "probit", or "mc" with `pred_type="nn"`
    n_samples : int, default=100
    loss : torchmetrics.Metric or callable, optional
        takes outputs and targets, and of a regression means, variances and targets; by default
        the negative log-likelihood
    log_prior_prec_min, log_prior_prec_max, grid_size, log_prior_prec_base
        the grid

    Raises
    ------
    ValueError
        If the data are empty, have no labels or are statistics of another fit, or the loss is not
        a number.
    """

    val_loader: Iterable[Any] | PredictiveStatistics
    pred_type: str = "glm"
    link_approx: str | None = None
    n_samples: int = 100
    loss: torchmetrics.Metric | Callable[..., torch.Tensor] | None = None
    log_prior_prec_min: float = -4
    log_prior_prec_max: float = 4
    grid_size: int = 100
    log_prior_prec_base: float = 10.0

    def _search(self, la: Posterior) -> TuningHistory:
        low, high, base = self.log_prior_prec_min, self.log_prior_prec_max, self.log_prior_prec_base
        around = self._start(la) if self._is_base else None
        grid = grid_of_priors(low, high, self.grid_size, base, around)
        batches = self._batches(la)
        loss = self.loss or la.trained_likelihood.metric(la.sigma_noise).to(la._device)

        def score(prior_precision: torch.Tensor) -> float:
            la.prior_precision = prior_precision
            if isinstance(loss, torchmetrics.Metric):
                loss.reset()
            loader: Any = batches()
            try:
                return validate(
                    la,  # pyright: ignore[reportArgumentType]
                    loader,
                    loss,
                    self.pred_type,
                    self.link_approx or ("mc" if self.pred_type == "nn" else "probit"),
                    self.n_samples,
                    la.dict_key_y,
                )
            except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
                return math.inf  # as the host does, for a matrix that is not a covariance

        with la.model.prepared():  # the host's function leaves the model in evaluation mode
            history = search_grid(score, grid, self.progress_bar)
        la.prior_precision = history.prior_precision[history.objective.argmin()]
        return history

    def _batches(self, la: Posterior) -> Callable[[], Iterable[Any]]:
        """Validation batches as pairs or mappings, anew at each prior precision."""
        statistics: PredictiveStatistics | None = None
        if self.pred_type == "glm":
            statistics = la.statistics_of(self.val_loader, self.progress_bar)
        if statistics is None:
            return self._checked_batches(la)
        targets = statistics.required_targets()

        def batches() -> Iterable[Any]:
            moments = statistics.moments(la.prior_precision, la._H_factor)
            sizes = statistics.batch_sizes
            return zip(moments.split(sizes), targets.split(sizes), strict=True)

        return batches

    def _checked_batches(self, la: Posterior) -> Callable[[], Iterable[Any]]:
        la._check_H_init()
        if count() > 1 and not isinstance(self.loss, torchmetrics.Metric | None):
            raise ValueError(
                "With several processes, pass a torchmetrics.Metric as the loss, which joins their "
                'results, or use hessian_structure="lowrank_kron" and pred_type="glm".'
            )

        def batches() -> Iterable[Any]:
            shard, n_data = Shard(self.val_loader), 0
            for name, batch in named_batches(self.val_loader):  # pyright: ignore[reportArgumentType]
                with naming(name):
                    X, y = la.model.split(batch)
                    logits = torch.zeros(len(y), la.n_outputs, device=la._device, dtype=la._dtype)
                    y = la.trained_likelihood.check_targets(y, logits)
                new = is_new(shard.places(len(y)))
                n_data += int(new.sum())
                if new.any():
                    X, y = (X, y) if new.all() else rows((X, y), new)
                    yield _Inputs(X), y
            if not sum(gathered(n_data)):
                raise ValueError("The loader has no data.")

        return batches


class _Inputs:
    """Inputs of any kind for the host's function, which moves them: the model does so itself."""

    def __init__(self, inputs: Any) -> None:
        self._inputs = inputs

    def to(self, _: torch.device) -> Any:
        return self._inputs
