"""The broadest posterior whose draws agree with the model on the training data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import tqdm
from scipy.optimize import brentq
from torch import Tensor

from laplace_lora_ext.predicting import Predictor
from laplace_lora_ext.predictive.links import DEFAULT_LINK
from laplace_lora_ext.predictive.moments import gaussian_samples, standard_normal
from laplace_lora_ext.predictive.posterior import Posterior, of_classes
from laplace_lora_ext.predictive.statistics import PredictiveStatistics
from laplace_lora_ext.processes import count
from laplace_lora_ext.processes.shards import (
    Share,
    data_size,
    examples_of,
    in_order_like,
    select_examples,
)
from laplace_lora_ext.tuning.method import (
    Trial,
    TuningHistory,
    TuningMethod,
    n_kinds_of,
    seed_of_search,
    statistics_of_classes,
)

_CHUNK = 2**22  # numbers that are sampled at once
# The search is in the logarithm of a factor by which the start is multiplied.
_FARTHEST = math.log(1e8)
_STRIDE = math.log(10.0)  # until the change that is allowed is passed
_ACCURACY = 1e-2  # one per cent of the prior precision


@dataclass(frozen=True, kw_only=True, eq=False)
class Agreement(TuningMethod):
    """Take the broadest posterior whose draws agree with the model on its data.

    Each draw from the posterior has class probabilities of its own. Their mean total
    variation distance from the model's, `½ Σ_c |p_c - p*_c|`, measures how much a draw
    changes predictions on the training data. The method takes the smallest prior
    precision at which it is `max_change`, or the last within a factor of 1e8 of the
    start. Labels are not used, so memorised noise goes unnoticed, and leaves the
    posterior too narrow. `benchmarks/README.md` has the figures.

    Parameters
    ----------
    init_prior_prec : float or torch.Tensor, default=1.0
        where the search starts; one common factor of several numbers is chosen
    prior_structure : {"scalar", "kind", "layerwise", "diag"}, optional
        as for `TuningMethod`. With "kind", the draws of each kind of weight by
        themselves change predictions as much as those of any other
    progress_bar : bool, default=False
        whether to show one
    train_loader : DataLoader, iterable or PredictiveStatistics
        the data of the fit, or texts like them; labels are not used. They pass through
        the model once, or not at all if you pass
        `la.predictive_statistics(train_loader)`
    max_change : float, default=0.1
        between 0 and 1: the distance that is allowed on average
    n_samples : int, default=100
        draws for each example, the same for every prior precision
    max_examples : int, default=2000
        from a loader of a larger data set this many are drawn at random, and only they
        pass through the model; all of an iterable do. The distance is an average, so
        its error falls with the square root of their number. `PredictiveStatistics`
        says how much memory each takes
    generator : torch.Generator, optional
        for the draws and the examples; if omitted, every call uses the same

    Raises
    ------
    ValueError
        If there are no data.
    NotImplementedError
        For numbers, and for another structure than "lowrank_kron".

    References
    ----------
    Shi et al., "Training-free Bayesianization for low-rank adapters of large language
    models", arXiv:2412.05723: the most noise that changes next to no prediction. There
    the noise is isotropic, and what changes is the most probable class of the mean of
    ten draws.
    """

    train_loader: Iterable[Any] | PredictiveStatistics
    max_change: float = 0.1
    n_samples: int = 100
    max_examples: int = 2000
    generator: torch.Generator | None = None

    def _search(self, la: Predictor) -> TuningHistory:
        (posterior,) = la.members
        start = self._start(la)
        change = self._change(posterior)
        kinds = self._kinds(la)
        if kinds is not None:
            # One distance can't tell two prior precisions. So each kind by itself gets
            # the change that is allowed, and then a common factor makes it that of all.
            balanced = start.expand(len(kinds))
            for kind in range(n_kinds_of(kinds)):
                is_drawn = (kinds == kind).to(start.device)
                # All others stay at their MAP values.
                alone = torch.where(is_drawn, start, torch.inf)
                found = self._broadest(alone, change).chosen.prior_precision
                balanced = torch.where(is_drawn, found.to(start), balanced)
            start = balanced
        return self._broadest(start, change)

    def _change(self, la: Posterior) -> Callable[[Tensor], float]:
        """Make a function from a prior precision to draws' mean distance."""
        seed = seed_of_search(self.generator)
        data = draw_some(self.train_loader, self.max_examples, seed)
        statistics = statistics_of_classes(la, data, DEFAULT_LINK, self.progress_bar)

        def change(prior_precision: Tensor) -> float:
            # The same draws at every prior precision: then the change falls with it
            # smoothly.
            draws = torch.Generator().manual_seed(seed)
            at_once = max(1, _CHUNK // (self.n_samples * la.n_outputs))
            total = 0.0
            n_rows = 0
            for start in range(0, len(statistics), at_once):
                part = statistics[start : start + at_once]
                moments = part.moments(prior_precision).to("cpu")
                f_mu, f_var = of_classes(la.task, moments)
                noise = standard_normal((self.n_samples, *f_mu.shape), f_mu, draws)
                outputs = gaussian_samples(f_mu, f_var, noise)
                apart = (outputs.softmax(-1) - f_mu.softmax(-1)).abs().sum(-1) / 2
                total += apart.double().mean(0).sum().item()
                n_rows += apart[0].numel()  # of labels, the average is over labels too
            return total / n_rows

        return change

    def _broadest(
        self, start: Tensor, change: Callable[[Tensor], float]
    ) -> TuningHistory:
        """Choose the factor of a prior at which draws change as much as allowed."""
        tried: dict[float, Trial] = {}  # by the logarithm of the factor
        name = "[Comparing draws with the model]"
        bar = tqdm.tqdm(desc=name, disable=not self.progress_bar)

        def excess(log_factor: float) -> float:
            if log_factor not in tried:  # brentq asks again for both ends
                prior = math.exp(log_factor) * start
                tried[log_factor] = Trial(prior, objective=change(prior))
                bar.update()
            return tried[log_factor].objective - self.max_change

        root = _falling_root(excess)
        bar.close()
        return TuningHistory(list(tried.values()), choice=list(tried).index(root))


def _falling_root(excess: Callable[[float], float]) -> float:
    """Find where a function that falls passes 0, or the farthest place."""
    here = 0.0
    is_above = excess(here) > 0
    stride = _STRIDE if is_above else -_STRIDE
    # Walk in decades until the root lies between two of them: far away, where nothing
    # but rounding is left of differences, the function does not fall.
    while abs(here) < _FARTHEST:
        there = max(-_FARTHEST, min(here + stride, _FARTHEST))
        if (excess(there) > 0) != is_above:
            low, high = sorted((here, there))
            root = brentq(excess, low, high, xtol=_ACCURACY)
            assert isinstance(root, float)
            return root
        here = there
    return here


def draw_some(loader: Any, n_examples: int, seed: int) -> Any:
    """Draw examples from a larger loader before any pass, where possible."""
    if data_size(loader) is None:
        return loader
    if count() > 1 and not Share(loader).is_dealt:
        return loader  # each rank has other examples
    examples = examples_of(loader)
    if len(examples) <= n_examples:
        return loader
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(examples), generator=generator)
    some = examples[order[:n_examples]]
    return in_order_like(loader, select_examples(loader.dataset, some.tolist()))
