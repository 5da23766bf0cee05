"""Choices of the prior precision by the tokens of held-out texts, under draws of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from laplace_lora_ext.messages import naming
from laplace_lora_ext.models.batches import named_batches
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.processes.exchange import gathered, of_first
from laplace_lora_ext.tuning.gridsearch import grid_of_priors, search_grid
from laplace_lora_ext.tuning.method import TuningHistory, TuningMethod, draw_seed
from laplace_lora_ext.tuning.second_training import SecondTraining


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenGridSearch(TuningMethod):
    """Take the prior precision of a grid that makes the tokens of validation texts most likely.

    The loss is the mean negative log-likelihood of a labelled token under the mixture over draws.
    A text takes `grid_size * (1 + n_samples)` forward passes, 143 by default.

    Parameters
    ----------
    init_prior_prec : float or torch.Tensor
        several numbers are a base that the grid multiplies; a single number is ignored
    prior_structure, progress_bar
        as for `TuningMethod`
    val_loader : DataLoader or iterable
        batches of texts with labels
    n_samples : int, default=10
        how many draws
    generator : torch.Generator, optional
        for the draws
    log_prior_prec_min, log_prior_prec_max, grid_size, log_prior_prec_base
        the grid

    Raises
    ------
    ValueError
        If the data are empty or without labels, or the loss is not a number.
    """

    val_loader: Iterable[Any]
    n_samples: int = 10
    generator: torch.Generator | None = None
    log_prior_prec_min: float = -1
    log_prior_prec_max: float = 5
    grid_size: int = 13
    log_prior_prec_base: float = 10.0

    @torch.no_grad()
    def _search(self, la: Any) -> TuningHistory:
        limits = self.log_prior_prec_min, self.log_prior_prec_max
        base = self._start(la) if self._is_base else None
        grid = grid_of_priors(*limits, self.grid_size, self.log_prior_prec_base, base)
        seed = of_first(draw_seed(self.generator))

        def loss(prior_precision: torch.Tensor) -> float:
            la.prior_precision = prior_precision

            def of_batch(batch: Any) -> torch.Tensor:
                draws = torch.Generator(la.model.device).manual_seed(seed)
                scores = la.score(batch, self.n_samples, draws)
                return -scores.tokens.log_prob[scores.labelled]

            return _mean_over_tokens(la, self.val_loader, of_batch)

        history = search_grid(loss, grid, self.progress_bar)
        la.prior_precision = history.prior_precision[history.objective.argmin()]
        return history


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSecondTraining(SecondTraining):
    """`laplace_lora_ext.SecondTraining` for tokens: `TokenGridSearch` chooses by default."""

    search: Callable[..., TuningMethod] = TokenGridSearch


def _mean_over_tokens(
    la: Posterior, batches: Iterable[Any], numbers_of: Callable[[Any], torch.Tensor]
) -> float:
    """The mean of batches' numbers `(N,)` over all tokens and processes."""
    total, n_tokens = 0.0, 0
    for name, batch in named_batches(batches):
        with naming(name), la.model.prepared():
            numbers = numbers_of(batch)
        total += numbers.double().sum().item()
        n_tokens += len(numbers)
    totals, counts = zip(*gathered((total, n_tokens)), strict=True)
    if not sum(counts):
        raise ValueError("The loader has no data.")
    return sum(totals) / sum(counts)
