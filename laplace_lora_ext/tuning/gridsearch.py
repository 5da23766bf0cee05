"""The best prior precision of a grid on validation data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torchmetrics
import tqdm

from laplace_lora_ext.messages import warn
from laplace_lora_ext.predictive.data_sets import NO_DATA, Columns, batch_by_batch, over_loader
from laplace_lora_ext.predictive.links import DEFAULT_LINK
from laplace_lora_ext.predictive.statistics import (
    MixtureStatistics,
    PredictiveStatistics,
    Statistics,
    joined_statistics,
)
from laplace_lora_ext.processes.exchange import gathered
from laplace_lora_ext.processes.shards import Share, refuse_copies, stacked
from laplace_lora_ext.tuning.method import (
    HistoryBuilder,
    Predictor,
    Tunable,
    TuningHistory,
    TuningMethod,
)

_LinAlgError = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]
_EQUAL = 1e-6  # relative difference of losses that is rounding
_ROWS = 256  # examples that are predicted at once from their moments
_BYTES = 2**28  # of statistics that wait to be scored together


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
        once, and with their statistics not at all. In that pass, each example's loss is summed at
        every point of the grid, so that the memory does not grow with their number
    pred_type : {"glm", "nn"}
        which predictions to score
    link_approx : {"mean_field", "probit", "mc", "bridge", "bridge_norm"}, optional
        link for the predictions to score: choose the one that you predict with. By default
        "mean_field", or "mc" with `pred_type="nn"`, which has no other
    n_samples : int, default=100
    loss : torchmetrics.Metric or callable, optional
        takes outputs and targets, and of a regression means, variances and targets, of all
        examples at once, whose statistics are kept for it; by default the negative log-likelihood
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

    def _search(self, la: Tunable) -> TuningHistory:
        grid = grid_of_priors(
            self.log_prior_prec_min,
            self.log_prior_prec_max,
            self.grid_size,
            self.log_prior_prec_base,
            base=self._start(la) if self._is_base else None,
        )
        la.check_model()
        losses = self._losses_of_one_pass(la, grid)
        if losses is None:
            losses = self._losses_one_by_one(la, grid)
        history = record_grid(losses, grid, self.progress_bar)
        la.prior_precision = history.prior_precision[history.objective.argmin()]
        return history

    def remark(self, la: Tunable, history: TuningHistory) -> None:
        warn_of_ends(la, history)

    def _losses_of_one_pass(self, la: Predictor, grid: torch.Tensor) -> list[float] | None:
        """Sum the loss at every point of the grid in one pass, and keep no statistics.

        None where that can't be: a loss of the user's own asks for all examples at once, and some
        predictions need the model at every point.
        """
        is_given = isinstance(self.val_loader, PredictiveStatistics | MixtureStatistics)
        if is_given or self.pred_type != "glm" or self.loss is not None:
            return None
        statistics_of = la.statistics_by_batch()
        if statistics_of is None:
            return None
        losses = _Losses(grid, lambda statistics, point: self._nll_at(la, statistics, point))
        share = Share(self.val_loader)
        for statistics, _ in batch_by_batch(
            share, statistics_of, len, "[Predictive statistics]", self.progress_bar
        ):
            losses.add(statistics)
        return losses.means(share.is_dealt)

    def _nll_at(self, la: Predictor, statistics: Statistics, point: torch.Tensor) -> float:
        """Sum the examples' negative log-likelihood at a point of the grid."""
        la.prior_precision = point
        targets = statistics.required_targets().to(la.members[0].model.device)
        outputs = self._of_statistics(la, statistics)
        return _nll(la, outputs, targets).sum().item()

    def _losses_one_by_one(self, la: Predictor, grid: torch.Tensor) -> Iterator[float]:
        """Compute the loss at each point of the grid, which the posterior's prior is set to."""
        predictions = self._predictions(la)
        device = la.members[0].model.device
        for point in grid:
            la.prior_precision = point
            try:
                *outputs, targets = (column.to(device) for column in predictions())
                if self.loss is None:
                    yield _nll(la, outputs, targets).mean().item()
                else:
                    yield _evaluated(self.loss, outputs, targets)
            except _LinAlgError:
                yield math.inf  # as the host does, for a matrix that is not a covariance

    def _predictions(self, la: Predictor) -> Callable[[], Columns]:
        """Make a function that predicts all validation data at the present prior precision.

        It returns outputs and targets.
        """
        statistics: Statistics | None = None
        if self.pred_type == "glm":
            statistics = la.statistics_of(self.val_loader, self.progress_bar)
        if statistics is None:
            data = Share.read_once(self.val_loader)
            return lambda: over_loader(data, lambda batch: self._of_batch(la, batch))
        targets = statistics.required_targets()
        return lambda: (*self._of_statistics(la, statistics), targets)

    def _of_statistics(self, la: Predictor, statistics: Statistics) -> Columns:
        """Predict examples at the present prior precision; their outputs."""
        parts = statistics.moments(la.prior_precision).split(_ROWS)
        return stacked([self._outputs(la, part) for part in parts])

    def _of_batch(self, la: Predictor, batch: Any) -> Columns:
        """Predict a batch; its outputs and targets."""
        first = la.members[0]
        X, y = first.model.split(batch)
        outputs = self._outputs(la, X)
        # The check asks logits for their shape and place alone: none are computed for it.
        logits = torch.zeros(
            len(y),
            first.n_outputs,
            device=first.model.device,
            dtype=first.blocks[0].statistics_dtype,
        )
        return *outputs, first.trained_likelihood.check_targets(y, logits)

    def _outputs(self, la: Predictor, x: Any) -> Columns:
        """Predict probabilities, or of numbers means and variances."""
        default = "mc" if self.pred_type == "nn" else DEFAULT_LINK
        outputs = la(
            x,
            pred_type=self.pred_type,
            link_approx=self.link_approx or default,
            n_samples=self.n_samples,
            fitting=True,
        )
        return outputs if isinstance(outputs, tuple) else (outputs,)


class _Losses:
    """Sums of the examples' losses at every point of a grid; the examples themselves are let go.

    They wait until there are `_ROWS` or `_BYTES` of them, so that a point is not predicted more
    often than needed.

    Parameters
    ----------
    grid : torch.Tensor
        `(T,)` or `(T, blocks)` prior precisions
    loss : callable
        the sum over the examples of statistics, at a point
    """

    def __init__(
        self, grid: torch.Tensor, loss: Callable[[Statistics, torch.Tensor], float]
    ) -> None:
        self._grid = grid
        self._loss = loss
        self._sums = torch.zeros(len(grid), dtype=torch.float64)
        self._n_examples = 0
        self._squares = 0.0  # of the logits: ranks with the same data have the same
        self._waiting: list[Statistics] = []

    def add(self, statistics: Statistics) -> None:
        """Add a batch."""
        self._waiting.append(statistics)
        n_examples = sum(len(each) for each in self._waiting)
        n_bytes = sum(each.nbytes for each in self._waiting)
        if n_examples >= _ROWS or n_bytes >= _BYTES:
            self._score()

    def means(self, is_dealt: bool) -> list[float]:
        """Average over the examples of all ranks.

        A `ValueError` if there are none, or, unless the ranks were dealt one data set, if two ranks
        have the same.
        """
        self._score()
        of_ranks = gathered((self._n_examples, self._squares, self._sums))
        if not is_dealt:
            refuse_copies([(number, squares) for number, squares, _ in of_ranks])
        n_examples = sum(number for number, _, _ in of_ranks)
        if not n_examples:
            raise ValueError(NO_DATA)
        sums = torch.stack([sums for _, _, sums in of_ranks]).sum(0)
        return (sums / n_examples).tolist()

    def _score(self) -> None:
        """Score those that wait at every point, and let go of them."""
        if not self._waiting:
            return
        statistics = joined_statistics(self._waiting)
        self._waiting.clear()
        for index, point in enumerate(self._grid):
            try:
                self._sums[index] += self._loss(statistics, point)
            except _LinAlgError:
                self._sums[index] = math.inf  # no covariance, as for the host
        self._n_examples += len(statistics)
        f_mu = statistics.columns[0]
        self._squares += f_mu.double().square().sum().item()


def _nll(la: Predictor, outputs: Sequence[torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    """Compute each example's negative log-likelihood `(N,)`, in float64."""
    first = la.members[0]
    predicted = [output.double() for output in outputs]
    if not first.trained_likelihood.is_gaussian:
        predicted = [predicted[0].log()]
    return first.trained_likelihood.nll(predicted, targets, first.sigma_noise)


def _evaluated(
    loss: torchmetrics.Metric | Callable[..., torch.Tensor],
    outputs: Sequence[torch.Tensor],
    targets: torch.Tensor,
) -> float:
    """Evaluate a loss of the user's own on all data."""
    if not isinstance(loss, torchmetrics.Metric):
        return loss(*outputs, targets).item()
    loss.reset()  # a metric would add to what it has seen at other points
    loss.update(*outputs, targets)
    return loss.compute().sum().item()  # one number of a metric by class


def grid_of_priors(
    low: float, high: float, size: int, power: float, base: torch.Tensor | None
) -> torch.Tensor:
    """List powers of a number as `(size,)` prior precisions, or of a base, `(size, blocks)`."""
    # In float32, whatever the default is.
    grid = torch.logspace(low, high, size, base=power, dtype=torch.float32)
    if base is None:
        return grid
    return grid[:, None].to(base) * base


def search_grid(
    loss: Callable[[torch.Tensor], float], grid: torch.Tensor, progress_bar: bool = False
) -> TuningHistory:
    """Evaluate a loss at every prior precision of a grid, `(T,)` or `(T, blocks)`."""
    return record_grid(map(loss, grid), grid, progress_bar)


def record_grid(
    losses: Iterable[float], grid: torch.Tensor, progress_bar: bool = False
) -> TuningHistory:
    """Record the losses at the prior precisions of a grid, `(T,)` or `(T, blocks)`.

    A loss that is nan anywhere, or finite nowhere, is refused.
    """
    builder = HistoryBuilder()
    points = tqdm.tqdm(grid, disable=not progress_bar)
    for index, (point, loss) in enumerate(zip(points, losses, strict=True)):
        points.set_description(
            f"[Grid search | prior_prec: {_middle(point):.3e}, loss: {loss:.3f}]"
        )
        builder.add(index, loss, point)
    if not any(map(math.isfinite, builder.objectives)):
        raise ValueError("The validation loss is finite nowhere on the grid: check it.")
    if len(builder.objectives) > 1 and len(set(builder.objectives)) == 1:
        warn(
            "The validation loss is the same at every point of the grid. Pass a loss that depends "
            "on the predictive variance; the mean squared error of the mean, for one, does not."
        )
    return builder.history()


def warn_of_ends(la: Predictor, history: TuningHistory) -> None:
    """Warn where nothing is better than the first or the last prior precision of a grid."""
    losses = history.objective
    best = losses.min()
    if len(losses) < 3 or (losses == best).all():
        return  # a grid without a middle, or one of which `search_grid` has warned
    is_regression = la.members[0].trained_likelihood.is_gaussian
    noise = ""
    # Where both ends are as good, the first is taken, and spoken of.
    is_last = torch.isclose(losses[-1], best, rtol=_EQUAL, atol=0.0) and losses.argmin() > 0
    is_first = torch.isclose(losses[0], best, rtol=_EQUAL, atol=0.0)
    if is_last:
        last = _middle(history.prior_precision[-1])
        if is_regression:
            noise = " With regression, sigma_noise may be too large instead."
        warn(
            f"The best prior precision of the grid is the last, {last:.3g}: there is nothing to "
            "broaden. Predictions of these data are best without variance of the weights, since "
            "the model is as sure as it should be, or less, or since it was trained on these data: "
            f"no posterior makes it surer.{noise} If a larger prior precision may be better still, "
            "raise log_prior_prec_max."
        )
    elif is_first:
        first = _middle(history.prior_precision[0])
        if is_regression:
            noise = " With regression, sigma_noise may be too small instead."
        warn(
            f"The best prior precision of the grid is the first, {first:.3g}: still more variance "
            "might be better. The model is far too sure of these data, or knows nothing of them: "
            f"check that it is trained, and with these labels.{noise} If it is, lower "
            "log_prior_prec_min."
        )


def _middle(prior_precision: torch.Tensor) -> float:
    """Take the geometric mean of a prior's precisions."""
    return prior_precision.log().mean().exp().item()
