"""The broadest posterior whose draws still agree with the model on the tokens of texts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.models.weights import LoRAWeights
from laplace_lora_ext.processes.exchange import one_generator
from laplace_lora_ext.processes.shards import total_size
from laplace_lora_ext.text.draws import drawn, mean_over_tokens
from laplace_lora_ext.tuning.agreement import broadest, check_max_change
from laplace_lora_ext.tuning.method import TuningHistory, TuningMethod, draw_seed


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenAgreement(TuningMethod):
    """Take the broadest posterior whose draws still agree with the model on the training texts.

    `laplace_lora_ext.Agreement` for tokens. At each labelled token, it takes the total variation
    distance between a draw's distribution and the model's, `½ Σ_v |p_v - p*_v|`, and chooses the
    prior precision at which the mean distance is `max_change`. Labels only say which tokens count.
    Noise is the same at every prior precision; a text takes about ten times `1 + n_samples` forward
    passes.

    Parameters
    ----------
    init_prior_prec, prior_structure, progress_bar
        of `TuningMethod`; one common factor of the start is chosen
    train_loader : DataLoader or iterable
        the data of the fit, or texts like them
    max_change : float, default=0.1
        the mean distance to allow, between 0 and 1
    n_samples : int, default=10
        how many draws
    max_examples : int, default=100
        with more texts, take only every second, third... batch. The history says how many texts
        there were
    generator : torch.Generator, optional
        for the draws

    Raises
    ------
    ValueError
        If `max_change` is not between 0 and 1, `max_examples` is below 1, or the data are empty
        or without labels.

    Warns
    -----
    UserWarning
        If no prior precision within a factor of 1e8 of the start has this change.
    """

    train_loader: Iterable[Any]
    max_change: float = 0.1
    n_samples: int = 10
    max_examples: int = 100
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_max_change(self.max_change)

    @torch.no_grad()
    def _search(self, la: Posterior) -> TuningHistory:
        start = self._start(la)
        seed = draw_seed(one_generator(self.generator))
        stride = max(1, total_size(self.train_loader, la.n_data) // self.max_examples)
        weights = LoRAWeights(la.model, la.blocks)

        def change(prior_precision: torch.Tensor) -> tuple[float, int]:
            la.prior_precision = prior_precision
            draws = list(drawn(la, self.n_samples, seed))

            def of_batch(batch: Any) -> torch.Tensor:
                own = la.model(batch).softmax(-1)
                parts = (weights.run(batch, values).softmax(-1) for values in draws)
                return torch.stack([(p - own).abs().sum(-1) / 2 for p in parts]).mean(0)

            batches = islice(self.train_loader, 0, None, stride)
            return mean_over_tokens(la, batches, of_batch)

        return broadest(la, start, self.max_change, change, self.progress_bar)
