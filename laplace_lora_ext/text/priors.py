"""Choose a prior precision by draws: what they change, or how well they fit.

Noise and data are the same at every prior precision: a loader is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace_lora_ext.predictive.data_sets import Columns, over_loader
from laplace_lora_ext.processes.exchange import of_first
from laplace_lora_ext.processes.shards import Share, total_size
from laplace_lora_ext.text.scores import Draw, Reader, drawn, trained
from laplace_lora_ext.tuning.agreement import broadest, check_max_change
from laplace_lora_ext.tuning.gridsearch import grid_of_priors, search_grid, warn_of_ends
from laplace_lora_ext.tuning.method import (
    Tunable,
    TuningHistory,
    TuningMethod,
    draw_seed,
)
from laplace_lora_ext.tuning.second_training import SecondTraining


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenAgreement(TuningMethod):
    """Take the broadest posterior whose draws agree with the model on its texts.

    `laplace_lora_ext.Agreement` for tokens. At each labelled token, it takes the total
    variation distance between a draw's distribution and the model's, `½ Σ_v |p_v -
    p*_v|`, and chooses the prior precision at which the mean distance is `max_change`.
    Labels only say which tokens count. A text takes about ten times `1 + n_samples`
    forward passes.

    Parameters
    ----------
    init_prior_prec : float or torch.Tensor, default=1.0
        where the search starts; one common factor of several numbers is chosen
    prior_structure : {"scalar", "layerwise"}, optional
        as for `TuningMethod`, but not "kind"
    progress_bar : bool, default=False
    train_loader : DataLoader or iterable
        the data of the fit, or texts like them
    max_change : float, default=0.1
        the mean distance to allow, between 0 and 1
    n_samples : int, default=10
        how many draws
    max_examples : int, default=100
        with more texts, take only every second, third... batch
    generator : torch.Generator, optional
        for the draws

    Raises
    ------
    ValueError
        If `max_change` is not between 0 and 1, `max_examples` is below 1, or the data
        are empty or without labels.

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
        _refuse_kinds(self)
        check_max_change(self.max_change)

    @torch.no_grad()
    def _search(self, la: Any) -> TuningHistory:
        start = self._start(la)
        seed = of_first(draw_seed(self.generator))
        n_examples = total_size(self.train_loader, la.n_data)
        stride = max(1, n_examples // self.max_examples)
        share = Share.read_once(self.train_loader, stride)

        def change(prior_precision: Tensor) -> float:
            la.prior_precision = prior_precision
            draws = [Draw(la, weights) for weights in drawn(la, self.n_samples, seed)]

            def distances(batch: Any) -> Columns:
                parts = la.model.by_texts(batch)
                of_parts = [_distances_to_model(la, draws, part) for part in parts]
                sums, counts = zip(*of_parts, strict=True)
                return torch.cat(sums), torch.cat(counts)

            return _mean_over_tokens(share, distances)

        return broadest(la, start, self.max_change, change, self.progress_bar)


def _refuse_kinds(method: TuningMethod) -> None:
    """Refuse a prior for each kind, since every prior that is tried takes passes."""
    if method.prior_structure == "kind":
        raise NotImplementedError(
            f"{type(method).__name__} tries one common factor: pass "
            'prior_structure="scalar", or choose a prior for each kind by '
            'method="marglik" and pass it as init_prior_prec.'
        )


def _distances_to_model(
    la: Any,
    draws: Sequence[Draw],
    batch: Any,
) -> Columns:
    """Sum draws' mean distances over each text's labels, and count the labels."""
    model = la.model
    parts = model.parts(batch)
    of_trained = Reader(trained(la), batch, parts)
    of_draws = [Reader(draw, batch, parts) for draw in draws]
    labelled = model.labelled(batch).to(model.device)
    by_place = torch.zeros(labelled.shape, dtype=torch.float64, device=model.device)
    for part in parts:
        p_of_model = of_trained.logits(part).softmax(-1)
        distances = []
        for reader in of_draws:
            p_of_draw = reader.logits(part).softmax(-1)
            # Total variation.
            distances.append((p_of_draw - p_of_model).abs().sum(-1) / 2)
        places = model.labelled(batch, part).to(model.device)
        by_place[places] = torch.stack(distances).mean(0).double()
    return by_place.sum(1), labelled.sum(1)


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenGridSearch(TuningMethod):
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
    val_loader : DataLoader or iterable
        batches of texts with labels
    n_samples : int, default=10
        how many draws
    generator : torch.Generator, optional
        for the draws
    log_prior_prec_min : float, default=-1
        logarithm of the grid's first prior precision, to the base `log_prior_prec_base`
    log_prior_prec_max : float, default=5
        logarithm of its last
    grid_size : int, default=13
        how many prior precisions it has
    log_prior_prec_base : float, default=10.0

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
    log_prior_prec_base: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_kinds(self)

    @torch.no_grad()
    def _search(self, la: Any) -> TuningHistory:
        grid = grid_of_priors(
            self.log_prior_prec_min,
            self.log_prior_prec_max,
            self.grid_size,
            self.log_prior_prec_base,
            base=self._start(la) if self._is_base else None,
        )
        seed = of_first(draw_seed(self.generator))
        share = Share.read_once(self.val_loader)

        def loss(prior_precision: Tensor) -> float:
            la.prior_precision = prior_precision

            def losses(batch: Any) -> Columns:
                # The same draws for each batch, as if all texts were one.
                generator = torch.Generator(la.members[0].model.device)
                generator.manual_seed(seed)
                scores = la.score(batch, self.n_samples, generator)
                log_prob = scores.tokens.log_prob.double().sum(1)
                return -log_prob, scores.labelled.sum(1)

            return _mean_over_tokens(share, losses)

        history = search_grid(loss, grid, self.progress_bar)
        la.prior_precision = history.prior_precision[history.objective.argmin()]
        return history

    def remark(self, la: Tunable, history: TuningHistory) -> None:
        """Warn if an end of the grid is the best."""
        warn_of_ends(la, history)


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSecondTraining(SecondTraining):
    """Train again, as `SecondTraining`, and let a `TokenGridSearch` choose."""

    search: Callable[..., TuningMethod] = TokenGridSearch


def _mean_over_tokens(
    share: Share,
    of_batch: Callable[[Any], Columns],
) -> float:
    """Average over all processes' tokens, given a batch's sums and counts `(B,)`."""
    sums, counts = over_loader(share, of_batch)
    return sums.sum().item() / counts.sum().item()
