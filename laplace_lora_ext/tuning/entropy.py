"""The prior precision at which predictions are as uncertain as those of an earlier posterior."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.predictive.moments import Moments
from laplace_lora_ext.predictive.statistics import PredictiveStatistics
from laplace_lora_ext.tuning.history import TuningHistory
from laplace_lora_ext.tuning.method import TuningMethod
from laplace_lora_ext.tuning.moments_along import moments_along, some_of
from laplace_lora_ext.tuning.roots import matched

_SEED = 0  # of the examples: two posteriors are asked about the same ones
_MOST_EXAMPLES = 2000
_ROWS = 1024
_REACH = math.log(10.0)  # of the factor's logarithm


@dataclass(frozen=True, kw_only=True, eq=False)
class MatchedEntropy(TuningMethod):
    """Take the prior precision at which the mean predictive entropy of some data is a given one.

    It carries a choice over to another posterior. Held-out examples have chosen a prior precision
    for a model that has not seen them; a model that has learnt them too is less or more sure, and
    needs another one to be as uncertain on the same examples. Labels are not used. The result is
    within a factor of ten of the start: of a model that knows next to nothing, the entropy says as
    little.

    Parameters
    ----------
    init_prior_prec, prior_structure, progress_bar
        of `TuningMethod`; one common factor of the start is chosen
    train_loader : DataLoader, iterable or PredictiveStatistics
        the data whose entropy is to be matched; of more than 2,000 examples about as many
    entropy : float
        in nats, as `mean_entropy` gives it for the other posterior
    """

    train_loader: Iterable[Any] | PredictiveStatistics
    entropy: float

    def _search(self, la: Posterior) -> TuningHistory:
        start = self._start(la)
        entropy = _mean_entropy_along(la, self.train_loader, self.progress_bar)
        la.prior_precision, history = matched(entropy, self.entropy, start, _REACH)
        return history


def mean_entropy(la: Posterior, data: Any, progress_bar: bool = False) -> float:
    """Mean entropy of a posterior's predictions in nats, of class probabilities or densities.

    Classes are predicted with the link "mean_field"; a regression's densities include its noise.
    `data` are as for `MatchedEntropy`.
    """
    return _mean_entropy_along(la, data, progress_bar)(la.prior_precision)


def _mean_entropy_along(
    la: Posterior, data: Any, progress_bar: bool
) -> Callable[[torch.Tensor], float]:
    moments = moments_along(la, some_of(data, _MOST_EXAMPLES, la.n_data, _SEED), progress_bar)

    def mean(prior_precision: torch.Tensor) -> float:
        parts = moments(prior_precision).split(_ROWS)
        return torch.cat([_entropies(la, part) for part in parts]).double().mean().item()

    return mean


def _entropies(la: Posterior, moments: Moments) -> torch.Tensor:
    """`(B,)`."""
    predicted: Any = la(moments, link_approx="mean_field", fitting=True)  # pyright: ignore[reportCallIssue]
    if not la.trained_likelihood.is_gaussian:
        return torch.special.entr(predicted).sum(-1)
    f_mu, f_var = predicted
    n_outputs = f_mu.shape[1]
    noise = la.sigma_noise.detach().to(f_var).square() * torch.eye(n_outputs).to(f_var)
    logdet = (f_var + noise).double().logdet()
    return (logdet + n_outputs * math.log(2 * math.pi * math.e)) / 2
