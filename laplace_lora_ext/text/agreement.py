"""The broadest posterior whose draws still agree with the model on the tokens of texts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from laplace_lora_ext.messages import warn
from laplace_lora_ext.processes.shards import total_size
from laplace_lora_ext.text.on_grid import Drawn, OnGrid, TextPosterior
from laplace_lora_ext.tuning.history import TuningHistory


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenAgreement(OnGrid):
    """Take the broadest posterior whose draws still agree with the model on the training texts.

    `laplace_lora_ext.Agreement` for tokens. At each labelled token, it takes the total variation
    distance between a draw's distribution and the model's, `½ Σ_v |p_v - p*_v|`, and chooses the
    prior precision at which the mean distance is `max_change`, interpolating in the logarithm
    between points of the grid. Labels only say which tokens count.

    Parameters
    ----------
    train_loader : DataLoader or iterable
        the data of the fit, or texts like them
    max_change : float, default=0.1
        the mean distance to allow, between 0 and 1
    max_examples : int, default=100
        with more texts, take only every second, third... batch. A text takes about 140 forward
        passes, 14 a draw. The history says how many texts there were
    init_prior_prec, prior_structure, progress_bar, n_samples, generator, log_prior_prec_min, \
log_prior_prec_max, grid_size, log_prior_prec_base
        as for `OnGrid`

    Raises
    ------
    ValueError
        If `max_change` is not between 0 and 1, `max_examples` is below 1, or the data are empty
        or without labels.

    Warns
    -----
    UserWarning
        If no prior precision of the grid gives this distance; then the nearest end is chosen.
    """

    train_loader: Iterable[Any]
    max_change: float = 0.1
    max_examples: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.max_change < 1:
            raise ValueError(f"max_change must be between 0 and 1, not {self.max_change}.")

    def _search(self, la: TextPosterior) -> TuningHistory:  # pyright: ignore[reportIncompatibleMethodOverride]
        stride = max(1, total_size(self.train_loader, la.n_data) // self.max_examples)
        history = self._means(la, self.train_loader, stride)
        changes, points = history.objective, history.prior_precision
        # The change falls along the grid; look between the last point above the limit and the next.
        above = (changes > self.max_change).nonzero().flatten()
        after = int(above[-1]) + 1 if len(above) else 0
        if after in (0, len(changes)):
            end = min(after, len(changes) - 1)
            la.prior_precision = points[end]
            warn(
                f"No prior precision of the grid changes the tokens by {self.max_change:g} on "
                f"average: at its end, {points[end].mean().item():.3g}, it is "
                f"{changes[end].item():.3g}. Pass another log_prior_prec_min or log_prior_prec_max."
            )
            return history
        share = (changes[after - 1] - self.max_change) / (changes[after - 1] - changes[after])
        la.prior_precision = torch.lerp(
            points[after - 1].double().log(), points[after].double().log(), share.to(points.device)
        ).exp()
        return history

    def _of_batch(
        self, f: torch.Tensor, tokens: torch.Tensor, drawn: Iterable[Drawn]
    ) -> torch.Tensor:
        own = f.softmax(-1)
        result = f.new_zeros(self.grid_size, len(f))
        for place, logits in drawn:
            result[place] += (logits.softmax(-1) - own).abs_().sum(-1) / 2
        return result / self.n_samples
