"""The best prior precision of a grid on validation data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torchmetrics
import tqdm
from torch import Tensor

from laplace_lora_ext.curvature.factors import LinAlgError
from laplace_lora_ext.messages import warn
from laplace_lora_ext.predictive.data_sets import (
    NO_DATA,
    Columns,
    batch_by_batch,
    over_loader,
)
from laplace_lora_ext.predictive.links import DEFAULT_LINK, own_links
from laplace_lora_ext.predictive.statistics import (
    MixtureStatistics,
    PredictiveStatistics,
    Statistics,
    joined_statistics,
)
from laplace_lora_ext.processes.exchange import gathered, of_first
from laplace_lora_ext.processes.shards import Share, stacked
from laplace_lora_ext.tuning.method import (
    HistoryBuilder,
    Predictor,
    Tunable,
    TuningHistory,
    TuningMethod,
    check_grid,
    draw_seed,
)
from laplace_lora_ext.tuning.noise import unit_of_priors
from laplace_lora_ext.tuning.scales import (
    GridLosses,
    PriorAlone,
    Score,
    WithLogitScale,
    WithNoise,
)

_EQUAL = 1e-6  # relative difference of losses that is rounding
_BEYOND = 1e8  # times the last prior precision: without variance
_ROWS = 256  # examples that are predicted at once from their moments
_BYTES = 2**28  # of statistics that wait to be scored together


@dataclass(frozen=True, kw_only=True, eq=False)
class GridSearch(TuningMethod):
    """Try a grid of scalars, or of factors of `init_prior_prec`, on validation data.

    With each prior precision, the search tries scales of the logits from 0.04 to 20, by
    the same Gaussian logits, and chooses the best pair: `la.prior_precision` and
    `la.logit_scale`. One more point, far beyond the grid, has no variance to speak of:
    that is temperature scaling. So the pair is no worse on the validation data than the
    best prior or the best temperature alone, by the loss with a penalty of 4 (log
    scale)² on scales above 1, which keeps few examples from asking for much.

    Of a regression it chooses `la.sigma_noise` along with the prior precision λ. The
    grid is then of λ sigma_noise² in units of the mean squared slope of an output in
    the weights: how much less the prior lets an output vary than the noise does. So
    targets may have any unit.

    Parameters
    ----------
    init_prior_prec : float or torch.Tensor
        several numbers are a base that the grid multiplies; a single number is ignored
    prior_structure : {"scalar", "kind", "layerwise", "diag"}, optional
        as for `TuningMethod`. With "kind", the grid has all combinations of 25 prior
        precisions of two kinds, or of 8 of three; it is the default where one pass
        serves them all
    progress_bar : bool, default=False
    val_loader : DataLoader, iterable or PredictiveStatistics
        validation data with labels. With "lowrank_kron" and "glm" they pass through the
        model only once, and with their statistics not at all. In that pass, each
        example's loss is summed at every point of the grid, so that the memory does not
        grow with their number
    pred_type : {"glm", "nn"}
        which predictions to score
    link_approx : {"mean_field", "probit", "mc", "bridge", "bridge_norm"}, optional
        link for the predictions to score: choose the one that you predict with. By
        default "mean_field", or "mc" with `pred_type="nn"`, which has no other
    n_samples : int, default=100
    loss : torchmetrics.Metric or callable, optional
        takes outputs and targets, and of a regression means, variances and targets, of
        all examples at once, whose statistics are kept for it; by default the negative
        log-likelihood
    optimize_scale : bool, default=True
        False chooses the prior precision alone, at the present `logit_scale` or
        `sigma_noise`, and without the point beyond the grid. So do a `loss`, drawn
        weights ("nn"), bridges, which have no temperature as their limit, and mixtures
        of regressions
    log_prior_prec_min : float, default=-4
        logarithm of the grid's first prior precision, to the base `log_prior_prec_base`
    log_prior_prec_max : float, default=4
        logarithm of its last
    grid_size : int, default=100
        how many prior precisions it has
    log_prior_prec_base : float, default=10.0

    Raises
    ------
    ValueError
        If the data are empty, have no labels or are statistics of another fit, or the
        loss is not a number.

    Warns
    -----
    UserWarning
        If no prior precision of three or more is better than the first or, at a fixed
        scale, the last.
    """

    val_loader: Iterable[Any] | PredictiveStatistics
    pred_type: str = "glm"
    link_approx: str | None = None
    n_samples: int = 100
    loss: torchmetrics.Metric | Callable[..., Tensor] | None = None
    optimize_scale: bool = True
    log_prior_prec_min: float = -4
    log_prior_prec_max: float = 4
    grid_size: int = 100
    log_prior_prec_base: float = 10.0

    def _search(self, la: Tunable) -> TuningHistory:
        la.check_model()
        grid = self._grid(la)
        if self.loss is not None:
            history = record_grid(self._own_losses(la, grid), grid, self.progress_bar)
            la.prior_precision = history.prior_precision[history.objective.argmin()]
            return history
        score = self._score(la)
        unit = 1.0
        if isinstance(score, WithNoise):
            unit = unit_of_priors(la)
            la.sigma_noise = 1.0
        if not isinstance(score, PriorAlone):
            grid = torch.cat([grid, _BEYOND * grid[-1:]])
        losses = self._losses_of_one_pass(la, unit * grid, score)
        if losses is None:
            losses = self._losses_point_by_point(la, unit * grid, score)
        return replace(losses, grid=grid, unit=unit).choose(la)

    def remark(self, la: Tunable, history: TuningHistory) -> None:
        warn_of_ends(la, history)

    def _grid(self, la: Tunable) -> Tensor:
        """List the prior precisions to try, `(T,)` or `(T, blocks)`."""
        low, high = self.log_prior_prec_min, self.log_prior_prec_max
        size, power = self.grid_size, self.log_prior_prec_base
        base = self._start(la) if self._is_base else None
        kinds = self._kinds(la)
        # A grid over kinds has many points: by default only where one pass serves them
        # all.
        is_asked_for = self.prior_structure is not None
        in_one_pass = self.pred_type == "glm" and la.statistics_by_batch() is not None
        if kinds is None or not (is_asked_for or in_one_pass):
            return grid_of_priors(low, high, size, power, base)
        grid = kinds.grid(low, high, size, power)
        return grid if base is None else grid.to(base) * base

    def _score(self, la: Predictor) -> Score:
        """Decide whether there is a scale to choose with the prior."""
        first = la.members[0]
        if not self.optimize_scale or self.pred_type != "glm":
            return PriorAlone(self._outputs)
        if first.trained_likelihood.is_gaussian:
            # The noise of a mixture is that of its members.
            is_single = len(la.members) == 1
            return (
                WithNoise(first.n_outputs) if is_single else PriorAlone(self._outputs)
            )
        if self._link not in own_links(1, None):
            return PriorAlone(self._outputs)
        return WithLogitScale(self._link, self.n_samples, self._seed())

    @property
    def _link(self) -> str:
        """Return the link of the predictions that are scored."""
        default = "mc" if self.pred_type == "nn" else DEFAULT_LINK
        return self.link_approx or default

    def _seed(self) -> int:
        """Draw the seed of draws, if there are to be any; all ranks have the same."""
        return of_first(draw_seed(None)) if self._link == "mc" else 0

    def _losses_of_one_pass(
        self, la: Predictor, grid: Tensor, score: Score
    ) -> GridLosses | None:
        """Sum the loss at every point of the grid in one pass, and keep no statistics.

        None where that can't be: given statistics are kept anyway, and some predictions
        need the model at every point.
        """
        is_given = isinstance(self.val_loader, PredictiveStatistics | MixtureStatistics)
        if is_given or self.pred_type != "glm":
            return None
        statistics_of = la.statistics_by_batch(self._link)
        if statistics_of is None:
            return None
        sums = _Sums(la, grid, score)
        share = Share(self.val_loader)
        for statistics, _ in batch_by_batch(
            share,
            statistics_of,
            len,
            "[Predictive statistics]",
            self.progress_bar,
            la.members[0].model.owners,
        ):
            sums.add(statistics)
        share.refuse_copies()
        return sums.losses()

    def _losses_point_by_point(
        self,
        la: Predictor,
        grid: Tensor,
        score: Score,
    ) -> GridLosses:
        """Sum losses at each point of the grid, setting the prior to it."""
        terms_of_all = self._terms(la, score)
        sums = torch.zeros(len(grid), score.size, dtype=torch.float64)
        n_examples = 0
        points = tqdm.tqdm(grid, "[Grid search]", disable=not self.progress_bar)
        for index, point in enumerate(points):
            la.prior_precision = point
            try:
                terms = terms_of_all()
                n_examples = len(terms)
                sums[index] = terms.sum(0)
            except LinAlgError:
                # As the host does, for a matrix that is not a covariance.
                sums[index] = math.inf
        return GridLosses(grid, sums, n_examples, score)

    def _terms(
        self,
        la: Predictor,
        score: Score,
    ) -> Callable[[], Tensor]:
        """Make a function that scores all examples at the present prior precision."""
        statistics = self._statistics(la)
        if statistics is not None:
            return lambda: _scored(la, statistics, score)
        data = Share.read_once(self.val_loader)
        model = la.members[0].model

        def of_batch(batch: Any) -> Columns:
            X, y = model.split(batch)
            return (score.terms(la, X, _checked(la, y)),)

        return lambda: over_loader(data, of_batch, owners=model.owners)[0]

    def _statistics(self, la: Predictor) -> Statistics | None:
        """Pass over the validation data for their statistics, or take given ones."""
        if self.pred_type != "glm":
            return None
        return la.statistics_of(self.val_loader, self.progress_bar, self._link)

    def _own_losses(
        self,
        la: Predictor,
        grid: Tensor,
    ) -> Iterator[float]:
        """Compute the user's loss at each point, setting the prior to it."""
        assert self.loss is not None
        predictions = self._predictions(la)
        device = la.members[0].model.device
        for point in grid:
            la.prior_precision = point
            try:
                *outputs, targets = (column.to(device) for column in predictions())
                yield _evaluated(self.loss, _shown(la, outputs), targets)
            except LinAlgError:
                # As the host does, for a matrix that is not a covariance.
                yield math.inf

    def _predictions(self, la: Predictor) -> Callable[[], Columns]:
        """Make a function that predicts all validation data at the present prior.

        It returns outputs and targets.
        """
        statistics = self._statistics(la)
        if statistics is None:
            return partial(
                over_loader,
                Share.read_once(self.val_loader),
                partial(self._of_batch, la),
                owners=la.members[0].model.owners,
            )
        targets = statistics.required_targets()

        def of_statistics() -> Columns:
            return *self._of_statistics(la, statistics), targets

        return of_statistics

    def _of_statistics(self, la: Predictor, statistics: Statistics) -> Columns:
        """Predict examples at the present prior precision; their outputs."""
        parts = statistics.moments(la.prior_precision).split(_ROWS)
        return stacked([self._outputs(la, part) for part in parts])

    def _of_batch(self, la: Predictor, batch: Any) -> Columns:
        """Predict a batch; its outputs and targets."""
        X, y = la.members[0].model.split(batch)
        return *self._outputs(la, X), _checked(la, y)

    def _outputs(self, la: Predictor, x: Any) -> Columns:
        """Predict probabilities of classes, or of numbers means and variances."""
        outputs = la(
            x,
            pred_type=self.pred_type,
            link_approx=self._link,
            n_samples=self.n_samples,
            fitting=True,
        )
        return outputs if isinstance(outputs, tuple) else (outputs,)


class _Sums:
    """Sums of a score over examples at every point of a grid; the examples are let go.

    They wait until there are `_ROWS` or `_BYTES` of them, so that a point is not
    predicted more often than needed.

    Parameters
    ----------
    la : Predictor
        its prior precision is set to one point after the other
    grid : torch.Tensor
        `(T,)` or `(T, blocks)` prior precisions
    score : Score
    """

    def __init__(
        self,
        la: Predictor,
        grid: Tensor,
        score: Score,
    ) -> None:
        self._la = la
        self._grid = grid
        self._score = score
        self._sums = torch.zeros(len(grid), score.size, dtype=torch.float64)
        self._n_examples = 0
        self._waiting: list[Statistics] = []

    def add(self, statistics: Statistics) -> None:
        """Add a batch."""
        self._waiting.append(statistics)
        n_examples = sum(len(each) for each in self._waiting)
        n_bytes = sum(each.nbytes for each in self._waiting)
        if n_examples >= _ROWS or n_bytes >= _BYTES:
            self._take_in()

    def losses(self) -> GridLosses:
        """Add up the sums of all ranks; a `ValueError` if there are no examples."""
        self._take_in()
        n_examples = 0
        total = torch.zeros_like(self._sums)
        for number, sums in gathered((self._n_examples, self._sums)):
            n_examples += number
            total += sums
        if not n_examples:
            raise ValueError(NO_DATA)
        return GridLosses(self._grid, total, n_examples, self._score)

    def _take_in(self) -> None:
        """Score those that wait at every point, and let go of them."""
        if not self._waiting:
            return
        statistics = joined_statistics(self._waiting)
        self._waiting.clear()
        for index, point in enumerate(self._grid):
            self._la.prior_precision = point
            try:
                terms = _scored(self._la, statistics, self._score)
                self._sums[index] += terms.sum(0).cpu()
            except LinAlgError:
                self._sums[index] = math.inf  # no covariance, as for the host
        self._n_examples += len(statistics)


def _scored(
    la: Predictor,
    statistics: Statistics,
    score: Score,
) -> Tensor:
    """Score examples `(N, K)` at the present prior precision."""
    moments = statistics.moments(la.prior_precision)
    targets = statistics.required_targets()
    parts = zip(moments.split(_ROWS), targets.split(_ROWS), strict=True)
    terms: list[Tensor] = []
    for part, targets_of_part in parts:
        terms.append(score.terms(la, part, targets_of_part))
    return torch.cat(terms)


def _checked(
    la: Predictor,
    y: Tensor,
) -> Tensor:
    """Check targets as the losses take them."""
    first = la.members[0]
    # The check asks logits for their shape and place alone: none are computed for it.
    logits = torch.zeros(
        len(y),
        first.n_outputs,
        device=first.model.device,
        dtype=first.blocks[0].statistics_dtype,
    )
    return first.trained_likelihood.check_targets(y, logits)


def _shown(
    la: Predictor,
    outputs: Sequence[Tensor],
) -> Sequence[Tensor]:
    """Show a user's loss what it reads: of labels, each one's probability."""
    likelihood = la.members[0].trained_likelihood
    return [likelihood.shown(output) for output in outputs]


def _evaluated(
    loss: torchmetrics.Metric | Callable[..., Tensor],
    outputs: Sequence[Tensor],
    targets: Tensor,
) -> float:
    """Evaluate a loss of the user's own on all data."""
    if not isinstance(loss, torchmetrics.Metric):
        return loss(*outputs, targets).item()
    loss.reset()  # a metric would add to what it has seen at other points
    loss.update(*outputs, targets)
    return loss.compute().sum().item()  # one number of a metric by class


def grid_of_priors(
    low: float,
    high: float,
    size: int,
    power: float,
    base: Tensor | None,
) -> Tensor:
    """List a grid of prior precisions, `(size,)` or `(size, blocks)`."""
    # In float32, whatever the default is.
    grid = torch.logspace(low, high, size, base=power, dtype=torch.float32)
    if base is None:
        return grid
    return grid[:, None].to(base) * base


def search_grid(
    loss: Callable[[Tensor], float],
    grid: Tensor,
    progress_bar: bool = False,
) -> TuningHistory:
    """Evaluate a loss at every prior precision of a grid, `(T,)` or `(T, blocks)`."""
    return record_grid(map(loss, grid), grid, progress_bar)


def record_grid(
    losses: Iterable[float],
    grid: Tensor,
    progress_bar: bool = False,
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
    history = builder.history()
    check_grid(history)
    return history


def warn_of_ends(la: Predictor, history: TuningHistory) -> None:
    """Warn where the first or the last prior precision of a grid is the best."""
    losses = history.objective
    best = losses.min()
    if len(losses) < 3 or (losses == best).all():
        return  # a grid without a middle, or one of which `check_grid` has warned
    is_regression = la.members[0].trained_likelihood.is_gaussian
    noise = ""
    # Where both ends are as good, the first is taken, and spoken of. If a scale or a
    # noise was chosen too, the last is no fault: without variance, that number does all
    # that is needed.
    is_fixed = history.logit_scale is None and history.sigma_noise is None
    is_near_last = torch.isclose(losses[-1], best, rtol=_EQUAL, atol=0.0)
    is_last = is_fixed and is_near_last and losses.argmin() > 0
    is_first = torch.isclose(losses[0], best, rtol=_EQUAL, atol=0.0)
    if is_last:
        last = _middle(history.prior_precision[-1])
        if is_regression:
            noise = " With regression, sigma_noise may be too large instead."
        warn(
            f"The best prior precision of the grid is the last, {last:.3g}: there is "
            "nothing to broaden. Predictions of these data are best without variance "
            "of the weights, since the model is as sure as it should be, or less, or "
            f"since it was trained on these data: no posterior makes it surer.{noise} "
            "If a larger prior precision may be better still, raise log_prior_prec_max."
        )
    elif is_first:
        first = _middle(history.prior_precision[0])
        if is_regression and is_fixed:
            noise = " With regression, sigma_noise may be too small instead."
        warn(
            f"The best prior precision of the grid is the first, {first:.3g}: still "
            "more variance might be better. The model is far too sure of these data, "
            "or knows nothing of them: check that it is trained, and with these "
            f"labels.{noise} If it is, lower log_prior_prec_min."
        )


def _middle(prior_precision: Tensor) -> float:
    """Take the geometric mean of a prior's precisions."""
    return prior_precision.log().mean().exp().item()
