"""The broadest posterior whose draws agree with the model on the training data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import tqdm
from scipy.optimize import brentq

from laplace_lora_ext.messages import warn
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.predictive.data_sets import over_loader
from laplace_lora_ext.predictive.distributions import predictive_distribution
from laplace_lora_ext.predictive.moments import Moments, gaussian_samples, standard_normal
from laplace_lora_ext.predictive.statistics import PredictiveStatistics
from laplace_lora_ext.processes.exchange import count, of_first
from laplace_lora_ext.processes.shards import Share, chosen, data_size, examples_of, in_order_like
from laplace_lora_ext.tuning.method import Recorder, TuningHistory, TuningMethod, draw_seed

_CHUNK = 2**22  # numbers that are sampled at once
# Of the logarithm of a factor of the prior precision where the search starts:
_FARTHEST = math.log(1e8)
_STRIDE = math.log(10.0)  # until the change that is allowed is passed
_ACCURACY = 1e-2


@dataclass(frozen=True, kw_only=True, eq=False)
class Agreement(TuningMethod):
    """Take the broadest posterior whose draws still agree with the model on the training data.

    Each draw from the posterior has class probabilities of its own. Their mean total variation
    distance from the model's, `½ Σ_c |p_c - p*_c|`, measures how much a draw changes predictions
    on the training data. The method takes the smallest prior precision at which it is `max_change`.
    Labels are not used, so memorised noise goes unnoticed, and leaves the posterior too narrow.
    `benchmarks/README.md` has the figures.

    Parameters
    ----------
    init_prior_prec, prior_structure, progress_bar
        of `TuningMethod`; one common factor of the start is chosen
    train_loader : DataLoader, iterable or PredictiveStatistics
        the data of the fit, or texts like them; labels are not used. With "lowrank_kron" they
        pass through the model once, or not at all if you pass
        `la.predictive_statistics(train_loader)`
    max_change : float, default=0.1
        between 0 and 1: the distance that is allowed on average
    n_samples : int, default=100
        draws for each example, the same for every prior precision
    max_examples : int, default=2000
        from a loader of a larger data set this many are drawn at random, and only they pass through
        the model; all of an iterable do. The distance is an average, so its error falls with the
        square root of their number
    generator : torch.Generator, optional
        for the draws and the examples; if omitted, every call uses the same

    Raises
    ------
    ValueError
        If `max_change` is not between 0 and 1, the likelihood has no classes, or there are no
        data.

    Warns
    -----
    UserWarning
        If no prior precision within a factor of 1e8 of the start has this change.

    References
    ----------
    Shi et al., "Training-free Bayesianization for low-rank adapters of large language models",
    arXiv:2412.05723: the most noise that changes next to no prediction. There the noise is
    isotropic, and what changes is the most probable class of the mean of ten draws.
    """

    train_loader: Iterable[Any] | PredictiveStatistics
    max_change: float = 0.1
    n_samples: int = 100
    max_examples: int = 2000
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_max_change(self.max_change)

    def _search(self, la: Posterior) -> TuningHistory:
        if la.trained_likelihood.is_gaussian:
            raise ValueError(
                'method="agreement" compares class probabilities, and regression has none: use '
                '"marglik", or "gridsearch" with validation data.'
            )
        start = self._start(la)
        seed = of_first(0 if self.generator is None else draw_seed(self.generator))
        moments = _moments_along(la, self._data(seed), self.progress_bar)

        def change(prior_precision: torch.Tensor) -> float:
            draws = torch.Generator().manual_seed(seed)
            of_all = moments(prior_precision).to("cpu")
            n_examples, n_outputs = of_all.f_mu.shape
            total = 0.0
            for f_mu, f_var in of_all.split(max(1, _CHUNK // (self.n_samples * n_outputs))):
                noise = standard_normal((self.n_samples, *f_mu.shape), f_mu, draws)
                drawn = gaussian_samples(f_mu, f_var, noise).softmax(-1)
                distance = (drawn - f_mu.softmax(-1)).abs().sum(-1) / 2  # total variation
                total += distance.double().mean(0).sum().item()
            return total / n_examples

        return broadest(la, start, self.max_change, change, self.progress_bar)

    def _data(self, seed: int) -> Any:
        """The loader, or one of as many examples as there may be, drawn at random."""
        loader: Any = self.train_loader
        of_ranks = count() > 1 and not Share(loader).is_dealt
        if isinstance(loader, PredictiveStatistics) or data_size(loader) is None or of_ranks:
            return loader
        examples = examples_of(loader)
        if len(examples) <= self.max_examples:
            return loader
        order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed))
        some = examples[order[: self.max_examples]].tolist()
        return in_order_like(loader, chosen(loader.dataset, some))


def check_max_change(max_change: float) -> None:
    """Refuse a change that is no distance between distributions, or the largest."""
    if not 0 < max_change < 1:
        raise ValueError(f"max_change must be between 0 and 1, not {max_change}.")


def broadest(
    la: Posterior,
    start: torch.Tensor,
    max_change: float,
    change: Callable[[torch.Tensor], float],
    progress_bar: bool,
) -> TuningHistory:
    """Choose the factor of a prior precision at which draws change predictions as is allowed.

    `change` is the mean distance under a prior precision.
    """
    recorder = Recorder()
    name = "[Comparing draws with the model]"
    with tqdm.tqdm(desc=name, disable=not progress_bar) as bar:

        @cache
        def excess(log_factor: float) -> float:
            prior_precision = math.exp(log_factor) * start
            mean = change(prior_precision)
            recorder.add(len(recorder.objectives), mean, prior_precision)
            bar.update()
            return mean - max_change

        log_factor = _falling_root(excess)
    la.prior_precision = math.exp(log_factor) * start
    if abs(log_factor) > 0.99 * _FARTHEST:
        warn(
            f"No prior precision within a factor of 1e8 changes the predictions by "
            f"{max_change:g} on average: at {la.prior_precision.mean().item():.3g} the "
            f"change is {recorder.objectives[-1]:.3g}. Check that the adapter is trained."
        )
    return recorder.history()


def _falling_root(excess: Callable[[float], float]) -> float:
    """Where a falling function of a factor's logarithm passes 0, or the farthest place tried."""
    here, value = 0.0, excess(0.0)
    direction = 1.0 if value > 0 else -1.0
    while abs(here) < _FARTHEST:
        there = max(-_FARTHEST, min(here + direction * _STRIDE, _FARTHEST))
        next_value = excess(there)
        if (next_value > 0) != (value > 0):
            root = brentq(excess, *sorted((here, there)), xtol=_ACCURACY)
            assert isinstance(root, float)
            return root
        here, value = there, next_value
    return here


def _moments_along(
    la: Posterior, loader: Any, progress_bar: bool
) -> Callable[[torch.Tensor], Moments]:
    """A function from a prior precision to the data's moments.

    The loader is read once. With "lowrank_kron" the data pass through the model once, or not at all
    if they are statistics; with other structures at every prior precision, which `la` is left with.
    """
    statistics: PredictiveStatistics | None = la.statistics_of(loader, progress_bar)
    if statistics is not None:
        return statistics.moments

    data = Share.read_once(loader)

    def of_batches(prior_precision: torch.Tensor) -> Moments:
        la.prior_precision = prior_precision
        return Moments(
            *over_loader(data, lambda batch: predictive_distribution(la, la.model.inputs(batch)))
        )

    return of_batches
