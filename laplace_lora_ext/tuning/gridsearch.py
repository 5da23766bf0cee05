"""The best prior precision of a grid on validation data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
import tqdm
from scipy.interpolate import CubicSpline
from scipy.special import logsumexp, softmax
from torch import Tensor

from laplace_lora_ext.curvature.kron import LinAlgError
from laplace_lora_ext.messages import check_name, warn
from laplace_lora_ext.predicting import Predictor
from laplace_lora_ext.predictive.data_sets import (
    NO_DATA,
    Columns,
    batch_by_batch,
    over_loader,
)
from laplace_lora_ext.predictive.links import DEFAULT_LINK, LINKS, log_probabilities
from laplace_lora_ext.predictive.moments import Moments, mix_moments
from laplace_lora_ext.predictive.posterior import (
    WITHOUT_VARIANCE,
    Posterior,
    moments_for,
)
from laplace_lora_ext.predictive.statistics import (
    MixtureStatistics,
    PredictiveStatistics,
    TriedStatistics,
    contrasts_for,
    has_statistics,
    join_statistics,
    of_present_fit,
    statistics_of_batch,
)
from laplace_lora_ext.processes import gathered
from laplace_lora_ext.processes.shards import Share
from laplace_lora_ext.tuning.method import (
    Trial,
    TuningHistory,
    TuningMethod,
    n_kinds_of,
    seed_of_search,
    unit_of_priors,
)

# Points of a grid over several kinds, whose number is to the power of the kinds: 25 by
# 25.
_POINTS = 625
_BEYOND = 1e8  # times the last prior precision at least
_ROWS = 256  # examples that are predicted at once from their moments

_QUARTERS = np.arange(-8, 8) / 4
LOGIT_SCALES = (*(5.0**_QUARTERS).tolist(), 20.0)
"""Scales of the logits at which losses are summed, from 0.04 to 20; 1 is one of them.

Texts learnt by heart ask for temperatures of 5 to 11 (benchmarks/results/answers.md).
"""

# Where scales are weighed, between those at which losses are summed.
_LOG_SCALES = np.linspace(
    math.log(min(LOGIT_SCALES)), math.log(max(LOGIT_SCALES)), 1001
)

PENALTIES = (0.25, 4.0)
"""Times the squared logarithm of a scale, below 1 and above: what is added to the
summed loss, in nats.
"""

USUAL_PRIOR = 300.0
"""Times tr(H) / (N C): the prior precision that is usual, before any data."""

DECADES = 1.5
"""The standard deviation of log10 of the prior precision, before any data."""

LEAST_GAIN = 2.0
"""How much better a posterior without variance must be, in nats of all examples.

These numbers were chosen by draws of few texts, on tasks that settings are chosen on
(docs/tried.md).
"""

_SEED = 0  # of draws, which are the same for all examples, priors and scales

# Statistics of some examples, by each member.
_Portion = Sequence[PredictiveStatistics | TriedStatistics]


@dataclass(frozen=True, kw_only=True, eq=False)
class GridMethod(TuningMethod):
    """Tries a grid of scalars, or of factors of `init_prior_prec`.

    Attributes
    ----------
    log_prior_prec_min : float, default=-4
        logarithm of the grid's first prior precision, to the base 10
    log_prior_prec_max : float, default=4
        logarithm of its last
    grid_size : int, default=100
        how many prior precisions it has
    """

    log_prior_prec_min: float = -4
    log_prior_prec_max: float = 4
    grid_size: int = 100

    def _grid(self, la: Predictor, kinds: Tensor | None = None) -> Tensor:
        """List the prior precisions to try, `(T,)` or `(T, blocks)`.

        Those of several kinds are all combinations of fewer numbers for each, so that
        there are 625 together at most.
        """
        n_kinds = 1 if kinds is None else n_kinds_of(kinds)
        size = self.grid_size
        if n_kinds > 1:
            # Rounding must not make 24 of a root that is 25.
            size = min(size, int(_POINTS ** (1 / n_kinds) + 1e-9))
        low, high = self.log_prior_prec_min, self.log_prior_prec_max
        # In float32, whatever the default is.
        grid = torch.logspace(low, high, size, dtype=torch.float32)
        if kinds is not None:
            points = torch.cartesian_prod(*[grid] * n_kinds)
            grid = points.reshape(-1, n_kinds)[:, kinds]
        if not self._is_base:
            return grid
        base = self._start(la)
        return grid.reshape(len(grid), -1).to(base) * base


@dataclass(frozen=True, kw_only=True, eq=False)
class GridSearch(GridMethod):
    """Try a grid of scalars, or of factors of `init_prior_prec`, on validation data.

    With each prior precision λ, the search tries scales s of the logits from 0.04 to
    20, by the same Gaussian logits. Each pair weighs `exp(-summed loss)`, times how
    likely it is before any data. Chosen is the mean of log λ, and for this λ the mean
    of log s. With many data that is the best pair; with few the best is a matter of
    luck. One more point, far beyond the grid, has no variance to speak of: that is
    temperature scaling, and it is chosen where it is better by more than two nats of
    all data.

    Before any data log s is normal around 0, its standard deviation 0.35 above and 1.4
    below: `exp(-4 (log s)²)` and `exp(-(log s)² / 4)`. So few examples that are all
    right can't ask for much. And log10 λ is normal around that of 300 tr(H) / (N C),
    with curvature H, N training examples and C outputs; its standard deviation is 1.5.

    Of a regression it chooses `la.sigma_noise` along with the prior precision λ. The
    grid is then of λ sigma_noise² in units of the mean squared slope of an output in
    the weights: how much less the prior lets an output vary than the noise does. So
    targets may have any unit.

    The data pass through the model once, and not at all if you pass their statistics.
    In that pass, each example's loss is summed at every point of the grid, so that the
    memory does not grow with their number.

    Parameters
    ----------
    init_prior_prec : float or torch.Tensor
        several numbers are a base that the grid multiplies; a single number is ignored
    prior_structure : {"scalar", "kind", "layerwise", "diag"}, optional
        as for `TuningMethod`; "layerwise" and "diag" want several `init_prior_prec`.
        With "kind", the grid has all combinations of 25 prior precisions of two kinds,
        or of 8 of three; with "lowrank_kron" it is the default
    progress_bar : bool, default=False
        whether to show one
    val_loader : DataLoader, iterable or PredictiveStatistics
        validation data with labels
    link_approx : {"mean_field", "probit", "mc"}, default="mean_field"
        link for the predictions to score: choose the one that you predict with
    n_samples : int, default=100
        draws of "mc", the same at every point and in every call
    optimize_scale : bool, default=True
        False chooses the prior precision alone, at a `logit_scale` of 1 or at the
        present `sigma_noise`, and without the point beyond the grid. So do mixtures of
        regressions
    log_prior_prec_min : float, default=-4
        logarithm of the grid's first prior precision, to the base 10
    log_prior_prec_max : float, default=4
        logarithm of its last
    grid_size : int, default=100
        how many prior precisions it has

    Raises
    ------
    ValueError
        If the data are empty, have no labels or are statistics of another fit, or the
        loss is not a number.

    Warns
    -----
    UserWarning
        If no prior precision of three or more is better than the first or, at a fixed
        scale, the last; or if the data seem to be those of the fit.
    """

    val_loader: Iterable[Any] | PredictiveStatistics
    link_approx: str = DEFAULT_LINK
    n_samples: int = 100
    optimize_scale: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("link_approx", self.link_approx, LINKS)

    def _search(self, la: Predictor) -> TuningHistory:
        """Sum the examples' losses at every point of the grid, and choose one."""
        members = la.members
        # The grid is of factors of these: 1 for a posterior alone.
        own = [member.prior_precision.detach() for member in members]
        kinds = self._kinds(la)
        # A grid over kinds has many points: by default only where statistics serve all.
        if self.prior_structure is None and not has_statistics(members[0]):
            kinds = None
        grid = self._grid(la, kinds)
        score = self._score(members)
        if score.is_free:
            last = grid[-1:]
            factor = max(_BEYOND, WITHOUT_VARIANCE / last.min().item())
            grid = torch.cat([grid, factor * last])
            if members[0].task.has_noise:
                members[0].sigma_noise = torch.ones(())  # see `NoiseSquares`
                grid = unit_of_priors(members[0]) * grid
        # The members' at each point.
        priors = [[point.to(prior) * prior for prior in own] for point in grid]
        data = self.val_loader
        if isinstance(data, PredictiveStatistics | MixtureStatistics):
            summed = [_sum_losses(priors, score, members, self._given(members))]
        else:
            share = Share(data)
            batches = self._of_batches(share, members, priors)
            of_rank = _sum_losses(priors, score, members, _in_portions(batches))
            share.refuse_copies()
            summed = gathered(of_rank)
        sums, counts = zip(*summed, strict=True)
        total, n_examples = torch.stack(sums).sum(0), sum(counts)
        of_classes = isinstance(score, Likelihoods) and score.is_free
        if of_classes and n_examples == members[0].n_data:
            # Without variance and scale the loss is the trained model's.
            of_model = total[-1, LOGIT_SCALES.index(1.0)].item()
            _warn_of_training_data(of_model, float(members[0].loss))
        log_priors = _log_priors(grid, members, own)
        history = expected_choice(grid, total, n_examples, score, log_priors)
        warn_at_ends(history)
        return history

    def _score(self, members: Sequence[Posterior]) -> Likelihoods | NoiseSquares:
        """Say what is summed over the examples, and chosen beside the prior."""
        if not members[0].task.has_noise:
            scales = LOGIT_SCALES if self.optimize_scale else (1.0,)
            return Likelihoods(self.link_approx, self.n_samples, scales)
        if self.optimize_scale and len(members) == 1:
            return NoiseSquares(members[0].n_outputs)
        # A mixture's variance is the mean of its members', their noise included.
        noises = torch.stack([member.sigma_noise for member in members])
        noise = noises.square().mean().sqrt().item()
        return NoiseSquares(members[0].n_outputs, noise)

    def _given(self, members: Sequence[Posterior]) -> Iterator[_Portion]:
        """Yield the given statistics, some rows at a time."""
        data: Any = self.val_loader
        parts = data.members if isinstance(data, MixtureStatistics) else [data]
        given = [
            of_present_fit(member, part, self.link_approx)
            for member, part in zip(members, parts, strict=True)
        ]
        starts = range(0, len(given[0]), _ROWS)
        for start in tqdm.tqdm(starts, "[Grid search]", disable=not self.progress_bar):
            yield [each[start : start + _ROWS] for each in given]

    def _of_batches(
        self,
        share: Share,
        members: Sequence[Posterior],
        priors: Sequence[Sequence[Tensor]],
    ) -> Iterator[_Portion]:
        """Pass over the data; yield each batch's statistics for the priors."""
        of_members = list(zip(*priors, strict=True))

        def of_batch(batch: Any) -> _Portion:
            return [
                statistics_of_batch(
                    member, batch, contrasts_for(member, self.link_approx), priors=own
                )
                for member, own in zip(members, of_members, strict=True)
            ]

        title = "[Predictive statistics]"
        owners = members[0].model.owners
        for portion, _ in batch_by_batch(
            share, of_batch, title, self.progress_bar, owners
        ):
            yield portion


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenGridSearch(GridMethod):
    """Take the grid's prior precision that makes validation texts most likely.

    The loss is the mean negative log-likelihood of a labelled token under the mixture
    over draws. A text takes `grid_size * (1 + n_samples)` forward passes, 143 by
    default.

    Parameters
    ----------
    init_prior_prec : float or torch.Tensor
        several numbers are a base that the grid multiplies; a single number is ignored
    prior_structure : {"scalar", "layerwise", "diag"}, optional
        of several `init_prior_prec`, which the grid multiplies by one factor
    progress_bar : bool, default=False
        whether to show one
    val_loader : DataLoader or iterable
        batches of texts with labels
    n_samples : int, default=10
        how many draws
    generator : torch.Generator, optional
        for the draws; if omitted, every call uses the same
    log_prior_prec_min : float, default=-1
        logarithm of the grid's first prior precision, to the base 10
    log_prior_prec_max : float, default=5
        logarithm of its last
    grid_size : int, default=13
        how many prior precisions it has

    Raises
    ------
    ValueError
        If the data are empty or without labels, or the loss is not a number.

    Warns
    -----
    UserWarning
        If no prior precision of three or more is better than the first or the last.
    """

    val_loader: Iterable[Any]
    n_samples: int = 10
    generator: torch.Generator | None = None
    log_prior_prec_min: float = -1
    log_prior_prec_max: float = 5
    grid_size: int = 13

    @torch.no_grad()
    def _search(self, la: Predictor) -> TuningHistory:
        seed = seed_of_search(self.generator)
        # Noise and texts are the same at every prior precision.
        share = Share.read_once(self.val_loader)
        trials: list[Trial] = []
        grid = tqdm.tqdm(self._grid(la), "[Grid search]", disable=not self.progress_bar)
        for point in grid:
            la.prior_precision = point
            nll = nll_of_tokens(la, share, self.n_samples, seed)
            trials.append(Trial(point, objective=nll))
        history = TuningHistory.of_losses(trials)
        warn_at_ends(history)
        return history


def _in_portions(batches: Iterable[_Portion]) -> Iterator[_Portion]:
    """Join batches, so that a point is not predicted more often than needed."""
    waiting: list[_Portion] = []

    def joined() -> _Portion:
        return [join_statistics(of_member) for of_member in zip(*waiting, strict=True)]

    for batch in batches:
        waiting.append(batch)
        if sum(len(each[0]) for each in waiting) >= _ROWS:
            portion = joined()
            waiting.clear()
            yield portion
    if waiting:
        yield joined()


def _sum_losses(
    priors: Sequence[Sequence[Tensor]],
    score: Likelihoods | NoiseSquares,
    members: Sequence[Posterior],
    portions: Iterable[_Portion],
) -> tuple[Tensor, int]:
    """Sum examples' losses under every point's priors, `(T, K)`, and count them."""
    total = torch.zeros(len(priors), score.n_terms, dtype=torch.float64)
    n_examples = 0
    for portion in portions:
        targets = portion[0].required_targets()
        for own, of_point in zip(priors, total, strict=True):
            try:
                by_member = zip(portion, own, strict=True)
                moments = [each.moments(prior) for each, prior in by_member]
                of_point += score.terms(members, moments, targets).sum(0).cpu()
            except LinAlgError:
                of_point += math.inf  # as for the host
        n_examples += len(targets)
    return total, n_examples


def _log_priors(
    grid: Tensor, members: Sequence[Posterior], own: Sequence[Tensor]
) -> Tensor:
    """Compute log-densities `(T,)` of factors of members' priors, before any data.

    Of a regression they are alike: no table says what is usual there.
    """
    logs = grid.reshape(len(grid), -1).double().log10().mean(1).cpu()
    if members[0].task.has_noise:
        return torch.zeros_like(logs)
    for member, prior in zip(members, own, strict=True):
        usual = math.log10(USUAL_PRIOR * unit_of_priors(member))
        logs += (prior.double().log10().mean().cpu() - usual) / len(members)
    return -((logs / DECADES) ** 2) / 2


def _warn_of_training_data(loss: float, of_fit: float) -> None:
    """Warn where as many examples as a fit's have the very loss of the fit."""
    if math.isclose(loss, of_fit, rel_tol=1e-4):
        warn(
            "The validation data seem to be the training data: as many, with the same "
            "loss. The model knows their answers, and will be too sure of others. Pass "
            'held-out data, or choose with method="agreement".'
        )


def warn_at_ends(history: TuningHistory) -> None:
    """Warn where the first or the last prior precision of a grid is the best."""
    losses = history.objective
    if len(losses) < 3 or (losses == losses[0]).all():
        return  # a grid without a middle
    # If a scale or a noise was chosen too, the last is no fault: without variance, that
    # number does all that is needed.
    is_fixed = history.sigma_noise is None and (history.logit_scale == 1).all()
    # Where both ends are as good, the first is taken, and spoken of.
    if is_fixed and losses.argmin() > 0 and _is_best(losses, -1):
        warn(
            "The best prior precision of the grid is the last, "
            f"{_middle(history.prior_precision[-1]):.3g}: there is nothing to "
            "broaden. Predictions of these data are best without variance of the "
            "weights, since the model is as sure as it should be, or less, or "
            "since it was trained on these data: no posterior makes it surer. If a "
            "larger prior precision may be better still, raise log_prior_prec_max."
        )
    elif _is_best(losses, 0):
        warn(
            "The best prior precision of the grid is the first, "
            f"{_middle(history.prior_precision[0]):.3g}: still more variance might "
            "be better. The model is far too sure of these data, or knows nothing "
            "of them: check that it is trained, and with these labels. If it is, "
            "lower log_prior_prec_min."
        )


def _is_best(losses: Tensor, place: int) -> bool:
    """Tell whether a loss is the lowest but for rounding."""
    return torch.allclose(losses[place], losses.min(), rtol=2e-6, atol=0.0)


def _middle(prior_precision: Tensor) -> float:
    """Return the geometric mean of a prior's precisions."""
    return prior_precision.log().mean().exp().item()


def nll_of_tokens(
    la: Predictor, data: Any, n_samples: int = 10, seed: int = 0
) -> float:
    """Return the mean negative log-likelihood of a labelled token, in nats.

    It is that of the mixture over draws from the posterior, the same for all texts.
    """

    def of_texts(batch: Any) -> Columns:
        # The same draws for each batch, as if all texts were one.
        generator = torch.Generator(la.members[0].model.device).manual_seed(seed)
        scores = la.score(batch, n_samples, generator)
        return scores.tokens.log_prob.double().sum(1), scores.labelled.sum(1)

    log_probs, counts = over_loader(data, of_texts)
    return -log_probs.sum().item() / int(counts.sum())


@dataclass(frozen=True)
class Likelihoods:
    """Scores predictions of classes by their likelihood, at several scales.

    An example's numbers are its negative log-likelihoods, one for each scale s of
    `link(s f, s² V)`. Without a variance, s is the inverse of a temperature, and s = 1
    is the prior alone: what is best of all priors and scales is no worse than either.

    Few examples say little of s: thirty that are all right would ask for a very large
    one. So each s weighs `exp(-summed loss)`, and chosen is the mean of log s. And
    `scale_penalty` is added to the summed loss, which holds large scales back. Small
    ones are nearly free: models that have learnt their examples by heart are too sure,
    as a rule, and to be less sure of a few examples does little harm.

    Parameters
    ----------
    link_approx : str
    n_samples : int
        draws of "mc"
    scales : tuple of float
        S scales, `LOGIT_SCALES` where one is to be chosen
    """

    link_approx: str
    n_samples: int
    scales: tuple[float, ...]

    @property
    def n_terms(self) -> int:
        """Count the numbers of an example, S."""
        return len(self.scales)

    @property
    def is_free(self) -> bool:
        """Tell whether a scale is chosen beside each prior precision."""
        return self.n_terms > 1

    def terms(
        self, members: Sequence[Posterior], moments: Sequence[Moments], targets: Tensor
    ) -> Tensor:
        """Compute each example's losses `(N, S)` in float64, from members' moments."""
        link = self.link_approx
        of_members = [
            moments_for(member, own, link)
            for member, own in zip(members, moments, strict=True)
        ]
        losses: list[Tensor] = []
        for scale in self.scales:
            by_member: list[Tensor] = []
            for of_member in of_members:
                scaled = of_member.scaled(scale)
                draws = torch.Generator().manual_seed(_SEED)
                log_p = log_probabilities(scaled, link, self.n_samples, draws)
                by_member.append(log_p.double())
            log_p = torch.stack(by_member).logsumexp(0) - math.log(len(members))
            losses.append(members[0].task.nll(log_p, targets.to(log_p.device)))
        return torch.stack(losses, dim=1)

    def trial(self, prior_precision: Tensor, sums: Tensor, n_examples: int) -> Trial:
        """Choose the scale that sums `(S,)` expect, the mean of log s.

        The objective is `-log` of the mean weight of all scales, over the number of
        examples.
        """
        if not (self.is_free and sums.isfinite().all()):
            return Trial(prior_precision, objective=sums.sum().item() / n_examples)
        # The loss is smooth in log s. Between two scales a spline is exact to 1e-4, or
        # to 1e-3 at its ends and where logits are tens apart. A polynomial through more
        # of them is not.
        loss = CubicSpline(np.log(self.scales), sums.cpu().numpy())
        log_weights = -(loss(_LOG_SCALES) + scale_penalty(_LOG_SCALES))
        log_scale = softmax(log_weights) @ _LOG_SCALES
        log_mean = logsumexp(log_weights) - math.log(len(log_weights))
        return Trial(
            prior_precision,
            logit_scale=math.exp(log_scale),
            objective=-float(log_mean) / n_examples,
            loss=float(loss(log_scale)) / n_examples,
        )


def scale_penalty(log_scales: np.ndarray) -> np.ndarray:
    """Compute what scales add to a summed loss, in nats, from their logarithms."""
    below, above = PENALTIES
    return np.where(log_scales < 0, below, above) * np.square(log_scales)


@dataclass(frozen=True)
class NoiseSquares:
    """Scores predictions of numbers by their density, at a noise or at the best one.

    With residuals r, an example's negative log-likelihood at the noise σ is

        ½ log det(2π (σ² I + V)) + ½ rᵀ (σ² I + V)⁻¹ r

    and its numbers are `rᵀ (σ² I + V)⁻¹ r` and `log det(σ² I + V)`. Where the noise is
    to be chosen, the grid is of ρ = λ σ², with prior precision λ, and σ is 1 meanwhile,
    the posterior's too. Then all covariances are σ² times these, with matrices that σ
    is not in: the best σ² is the mean of the first number, for each output.

    Parameters
    ----------
    n_outputs : int
    noise : float, optional
        σ; None to choose it
    """

    n_outputs: int
    noise: float | None = None
    n_terms: ClassVar[int] = 2

    @property
    def is_free(self) -> bool:
        """Tell whether a noise is chosen beside each prior precision."""
        return self.noise is None

    def terms(
        self, members: Sequence[Posterior], moments: Sequence[Moments], targets: Tensor
    ) -> Tensor:
        """Compute each example's two numbers `(N, 2)` in float64.

        A `torch.linalg.LinAlgError` if rounding left no covariance.
        """
        by_member = zip(members, moments, strict=True)
        pairs = [moments_for(*member, "probit") for member in by_member]
        means, covariances = (torch.stack(parts) for parts in zip(*pairs, strict=True))
        mean, covariance = mix_moments(means.double(), covariances.double())
        residuals = targets.to(mean.device).double() - mean
        variance = 1.0 if self.noise is None else self.noise**2
        identity = torch.eye(self.n_outputs).to(covariance)
        root = torch.linalg.cholesky(variance * identity + covariance)
        whitened = torch.linalg.solve_triangular(
            root, residuals[..., None], upper=False
        )
        squares = whitened.square().sum((-2, -1))
        log_det = 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return torch.stack([squares, log_det], dim=1)

    def trial(self, prior_precision: Tensor, sums: Tensor, n_examples: int) -> Trial:
        """Choose the best noise, or take the given one."""
        squares, log_dets = sums.tolist()
        n_numbers = n_examples * self.n_outputs
        if self.noise is not None:
            nll = (n_numbers * math.log(2 * math.pi) + log_dets + squares) / 2
            return Trial(prior_precision, objective=nll / n_examples)
        variance = squares / n_numbers
        # At the best variance the squares over it are one for each number.
        of_noise = n_numbers * (math.log(2 * math.pi * variance) + 1)
        nll = (of_noise + log_dets) / 2
        # From ρ = λ σ² to λ.
        return Trial(
            prior_precision / variance,
            sigma_noise=math.sqrt(variance),
            objective=nll / n_examples,
        )


def expected_choice(
    grid: Tensor,
    sums: Tensor,
    n_examples: int,
    score: Likelihoods | NoiseSquares,
    log_priors: Tensor,
) -> TuningHistory:
    """Choose the prior precision that the examples expect, or none.

    That is the posterior mean of log λ, where each point weighs `exp(-summed
    objective)` times its prior. Few examples say little of λ, and their best point is a
    matter of luck (docs/tried.md). Chosen is the point next to the mean, or the one
    without variance where that is better by more than two nats of all examples.

    Parameters
    ----------
    grid : torch.Tensor
        `(T,)` or `(T, blocks)` prior precisions; where a noise is chosen too, for a
        noise of 1
    sums : torch.Tensor
        `(T, K)`, the score's terms, summed over examples in float64
    n_examples : int
    score : Likelihoods or NoiseSquares
        if it is free, the last prior precision is the one beyond the grid
    log_priors : torch.Tensor
        `(T,)`, in float64

    Raises
    ------
    ValueError
        If there are no examples, or the losses are never finite.
    """
    if not n_examples:
        raise ValueError(NO_DATA)
    trials = [
        score.trial(point, of_point, n_examples)
        for point, of_point in zip(grid, sums, strict=True)
    ]
    history = TuningHistory.of_losses(trials)  # it checks the objectives
    if math.isinf(history.loss):
        raise ValueError("The validation loss is finite nowhere on the grid: check it.")
    n_points = len(grid) - score.is_free
    objective = n_examples * history.objective[:n_points]
    logs = grid[:n_points].reshape(n_points, -1).log().double().cpu()
    mean = (log_priors[:n_points] - objective).softmax(0) @ logs
    choice = int((logs - mean).square().sum(1).argmin())
    if score.is_free:
        last = len(trials) - 1
        gain = history.objective[choice] - history.objective[last]
        if n_examples * gain > LEAST_GAIN:
            choice = last
    return replace(history, choice=choice)
