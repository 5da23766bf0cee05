"""The best prior precision of a grid on validation data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torchmetrics
import tqdm

from laplace_lora_ext.messages import warn
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.predictive.data_sets import Columns, over_loader
from laplace_lora_ext.predictive.links import DEFAULT_LINK
from laplace_lora_ext.predictive.statistics import PredictiveStatistics
from laplace_lora_ext.processes.shards import Share, stacked
from laplace_lora_ext.tuning.method import Recorder, TuningHistory, TuningMethod

_EQUAL = 1e-6  # relative difference of losses that is rounding
_ROWS = 256  # examples that are predicted at once from their moments


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
    link_approx : {"mean_field", "probit", "mc", "bridge", "bridge_norm"}, optional
        link for the predictions to score: choose the one that you predict with. By default
        "mean_field", or "mc" with `pred_type="nn"`, which has no other
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

    Warns
    -----
    UserWarning
        If no prior precision of three or more is better than the first or the last.
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
        limits = self.log_prior_prec_min, self.log_prior_prec_max
        base = self._start(la) if self._is_base else None
        grid = grid_of_priors(*limits, self.grid_size, self.log_prior_prec_base, base)
        predictions = self._predictions(la)

        def score(prior_precision: torch.Tensor) -> float:
            la.prior_precision = prior_precision
            try:
                *outputs, targets = (column.to(la.model.device) for column in predictions())
                if self.loss is not None:
                    return _evaluated(self.loss, outputs, targets)
                if la.trained_likelihood.is_gaussian:
                    predicted = [output.double() for output in outputs]
                else:
                    predicted = [outputs[0].double().log()]
                return la.trained_likelihood.nll(predicted, targets, la.sigma_noise).mean().item()
            except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
                return math.inf  # as the host does, for a matrix that is not a covariance

        history = search_grid(score, grid, self.progress_bar)
        la.prior_precision = history.prior_precision[history.objective.argmin()]
        return history

    def remark(self, la: Posterior, history: TuningHistory) -> None:
        warn_of_ends(la, history)

    def _predictions(self, la: Posterior) -> Callable[[], Columns]:
        """Outputs and targets of all validation data at the present prior precision."""
        options: dict[str, Any] = {"pred_type": self.pred_type, "n_samples": self.n_samples}
        default = "mc" if self.pred_type == "nn" else DEFAULT_LINK
        options |= {"link_approx": self.link_approx or default, "fitting": True}

        def outputs(x: Any) -> Columns:
            found: Any = la(x, **options)
            return found if isinstance(found, tuple) else (found,)

        def of_batch(batch: Any) -> Columns:
            X, y = la.model.split(batch)
            logits = torch.zeros(
                len(y), la.n_outputs, device=la.model.device, dtype=la.blocks[0].statistics_dtype
            )
            return *outputs(X), la.trained_likelihood.check_targets(y, logits)

        la.check_model()
        statistics: PredictiveStatistics | None = None
        if self.pred_type == "glm":
            statistics = la.statistics_of(self.val_loader, self.progress_bar)
        if statistics is None:
            data = Share.read_once(self.val_loader)
            return lambda: over_loader(data, of_batch)
        targets = statistics.required_targets()

        def of_moments() -> Columns:
            moments = statistics.moments(la.prior_precision)
            return *stacked([outputs(part) for part in moments.split(_ROWS)]), targets

        return of_moments


def _evaluated(loss: Any, outputs: Sequence[torch.Tensor], targets: torch.Tensor) -> float:
    if not isinstance(loss, torchmetrics.Metric):
        return loss(*outputs, targets).item()
    loss.reset()
    loss.update(*outputs, targets)
    return loss.compute().sum().item()


def grid_of_priors(
    low: float, high: float, size: int, power: float, base: torch.Tensor | None
) -> torch.Tensor:
    """Powers of a number as `(size,)` prior precisions, or times a base, as `(size, blocks)`."""
    # In float32, whatever the default is.
    grid = torch.logspace(low, high, size, base=power, dtype=torch.float32)
    return grid if base is None else grid[:, None].to(base) * base


def search_grid(
    loss: Callable[[torch.Tensor], float], grid: torch.Tensor, progress_bar: bool = False
) -> TuningHistory:
    """Evaluate a loss at every prior precision of a grid, `(T,)` or `(T, blocks)`.

    A loss that is nan anywhere, or finite nowhere, is refused.
    """
    recorder = Recorder()
    points = tqdm.tqdm(grid, disable=not progress_bar)
    for index, point in enumerate(points):
        result = loss(point)
        middle = point.log().mean().exp()
        points.set_description(f"[Grid search | prior_prec: {middle:.3e}, loss: {result:.3f}]")
        recorder.add(index, result, point)
    if not any(map(math.isfinite, recorder.objectives)):
        raise ValueError("The validation loss is finite nowhere on the grid: check it.")
    if len(recorder.objectives) > 1 and len(set(recorder.objectives)) == 1:
        warn(
            "The validation loss is the same at every point of the grid. Pass a loss that depends "
            "on the predictive variance; the mean squared error of the mean, for one, does not."
        )
    return recorder.history()


def warn_of_ends(la: Posterior, history: TuningHistory) -> None:
    """Warn where nothing is better than the first or the last prior precision of a grid."""
    losses, is_regression = history.objective, la.trained_likelihood.is_gaussian
    best = losses.min()
    if len(losses) < 3 or (losses == best).all():
        return  # a grid without a middle, or one of which `search_grid` has warned
    is_first, is_last = (
        torch.isclose(losses[end], best, rtol=_EQUAL, atol=0.0).item() for end in (0, -1)
    )
    first, last = (history.prior_precision[end].log().mean().exp().item() for end in (0, -1))
    if is_last and losses.argmin() > 0:
        noise = " With regression, sigma_noise may be too large instead." if is_regression else ""
        warn(
            f"The best prior precision of the grid is the last, {last:.3g}: there is nothing to "
            "broaden. Predictions of these data are best without variance of the weights, since "
            "the model is as sure as it should be, or less, or since it was trained on these data: "
            f"no posterior makes it surer.{noise} If a larger prior precision may be better still, "
            "raise log_prior_prec_max."
        )
    elif is_first:
        noise = " With regression, sigma_noise may be too small instead." if is_regression else ""
        warn(
            f"The best prior precision of the grid is the first, {first:.3g}: still more variance "
            "might be better. The model is far too sure of these data, or knows nothing of them: "
            f"check that it is trained, and with these labels.{noise} If it is, lower "
            "log_prior_prec_min."
        )
