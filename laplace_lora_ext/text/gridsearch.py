"""The prior precision of a grid that makes validation texts most likely."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from laplace_lora_ext.text.on_grid import Drawn, OnGrid, TextPosterior
from laplace_lora_ext.tuning.history import TuningHistory


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenGridSearch(OnGrid):
    """Take the prior precision of a grid that makes the tokens of validation texts most likely.

    The loss is the mean negative log-likelihood of a labelled token under the mixture over draws of
    the linearised model.

    Parameters
    ----------
    val_loader : DataLoader or iterable
        batches of texts with labels; memory holds about a dozen times the logits of a batch
    init_prior_prec, prior_structure, progress_bar, n_samples, generator, log_prior_prec_min, \
log_prior_prec_max, grid_size, log_prior_prec_base
        as for `OnGrid`

    Raises
    ------
    ValueError
        If the data are empty or without labels, or the loss is not a number.
    """

    val_loader: Iterable[Any]

    def _search(self, la: TextPosterior) -> TuningHistory:  # pyright: ignore[reportIncompatibleMethodOverride]
        history = self._means(la, self.val_loader)
        la.prior_precision = history.prior_precision[history.objective.argmin()]
        return history

    def _of_batch(
        self, f: torch.Tensor, tokens: torch.Tensor, drawn: Iterable[Drawn]
    ) -> torch.Tensor:
        result = f.new_full((self.grid_size, len(f)), -math.inf)
        for place, logits in drawn:
            of_label = logits.gather(-1, tokens[:, None]).squeeze(-1) - logits.logsumexp(-1)
            result[place] = torch.logaddexp(result[place], of_label)
        return math.log(self.n_samples) - result
