"""The choice of a prior precision by held-out texts, whose tokens draws predict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import tqdm

from laplace_lora_ext.predictive.data_sets import Columns, over_loader
from laplace_lora_ext.predictive.posterior import Members
from laplace_lora_ext.processes.shards import Share
from laplace_lora_ext.tuning.gridsearch import GridMethod
from laplace_lora_ext.tuning.method import Trial, TuningHistory, seed_of_search


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
    prior_structure : {"scalar", "layerwise"}, optional
        as for `TuningMethod`, but not "kind"
    progress_bar : bool, default=False
        whether to show one
    val_loader : DataLoader or iterable
        batches of texts with labels
    n_samples : int, default=10
        how many draws
    generator : torch.Generator, optional
        for the draws; if omitted, every call uses the same
    log_prior_prec_min : float, default=-1
        logarithm of the grid's first prior precision, to the base `log_prior_prec_base`
    log_prior_prec_max : float, default=5
        logarithm of its last
    grid_size : int, default=13
        how many prior precisions it has
    log_prior_prec_base : float, default=10.0
        base of both logarithms

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prior_structure == "kind":
            raise NotImplementedError(
                "A prior precision of texts has one common factor: pass "
                'prior_structure="scalar", or choose a prior for each kind by '
                'method="marglik" and pass it as init_prior_prec.'
            )

    @torch.no_grad()
    def _search(self, la: Members) -> TuningHistory:
        seed = seed_of_search(self.generator)
        # Noise and texts are the same at every prior precision.
        share = Share.read_once(self.val_loader)
        trials: list[Trial] = []
        grid = tqdm.tqdm(self._grid(la), "[Grid search]", disable=not self.progress_bar)
        for point in grid:
            la.prior_precision = point
            nll = nll_of_tokens(la, share, self.n_samples, seed)
            trials.append(Trial(point, objective=nll))
        return TuningHistory.of_losses(trials)


def nll_of_tokens(la: Members, data: Any, n_samples: int = 10, seed: int = 0) -> float:
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
