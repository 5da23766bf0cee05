"""Gradient descent on the loss of validation data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from laplace_lora_ext.predictive.distributions import of_classes
from laplace_lora_ext.predictive.links import DEFAULT_LINK, Link, mean_field, probit, sampled
from laplace_lora_ext.predictive.statistics import PredictiveStatistics
from laplace_lora_ext.tuning.method import (
    HistoryBuilder,
    Searched,
    Tunable,
    TuningHistory,
    TuningMethod,
    descent,
    draw_seed,
)
from laplace_lora_ext.tuning.samples import MOST_BYTES, statistics_within

_SMOOTH: dict[str, Link] = {"probit": probit, "mean_field": mean_field}
_CHECKPOINTS = 20  # how often the whole validation loss is measured
_SEED = 0  # of the examples, where there are too many
_ROWS = 256  # examples whose logits it samples at once


@dataclass(frozen=True, kw_only=True, eq=False)
class ValGD(TuningMethod):
    """Follow the gradient of the validation data's negative log-likelihood, for "lowrank_kron".

    Parameters
    ----------
    init_prior_prec : float or torch.Tensor, default=1.0
        as for `TuningMethod`
    prior_structure : {"scalar", "kind", "layerwise", "diag"}, optional
        as for `TuningMethod`
    progress_bar : bool, default=False
    val_loader : DataLoader, iterable or PredictiveStatistics
        validation data with labels. They pass through the model only once, and with their
        statistics not at all
    link_approx : {"mean_field", "probit", "mc"}, default="mean_field"
        link for the predictions to score: choose the one that you predict with. The paper's is "mc"
    n_samples : int, default=100
        samples of the logits, with "mc"
    n_steps : int, default=1000
    lr : float, default=0.1
        Adam's first step in the logarithm of the prior precision
    batch_size : int, default=4
        examples in a minibatch
    max_bytes : int, default=2**32
        how much memory the statistics may take in each process. Where those of all examples take
        more, as many as fit are drawn at random, the same in every call
    generator : torch.Generator, optional
        for minibatches and samples

    Raises
    ------
    ValueError
        If the data are empty, have no labels, or are statistics of another fit.
    NotImplementedError
        For another structure than "lowrank_kron".

    Warns
    -----
    UserWarning
        If examples are left out for `max_bytes`.

    References
    ----------
    Yang et al. (ICLR 2024), algorithm 3.
    """

    val_loader: Iterable[Any] | PredictiveStatistics
    link_approx: str = DEFAULT_LINK
    n_samples: int = 100
    n_steps: int = 1000
    lr: float = 0.1
    batch_size: int = 4
    max_bytes: int = MOST_BYTES
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.link_approx not in ("mc", *_SMOOTH):
            raise ValueError(
                'method="val_gd" needs one of the links "mc", "probit" and "mean_field", not '
                f"{self.link_approx!r}."
            )

    def _search(self, la: Tunable) -> TuningHistory:
        prior = self._searched(la)
        statistics = statistics_within(
            la, self.val_loader, self.max_bytes, _SEED, self.progress_bar, self.link_approx
        )
        if statistics is None:
            raise NotImplementedError(
                'method="val_gd" needs hessian_structure="lowrank_kron": use "gridsearch" instead.'
            )
        with torch.autocast(statistics.f_mu.device.type, enabled=False):  # of the backward pass
            history = self._descend(la, statistics, prior)
        la.prior_precision = history.prior_precision[history.objective.argmin()]
        return history

    def _link(self, generator: torch.Generator | None) -> Link:
        return _SMOOTH.get(self.link_approx) or sampled(self.n_samples, generator)

    def _descend(
        self, la: Tunable, statistics: PredictiveStatistics, prior: Searched
    ) -> TuningHistory:
        """Descend along stochastic gradients in the logarithm of the prior precision.

        Unlike the paper's constant step size, this one falls to 0 along half a cosine, so that the
        last steps average over minibatches. The history is the loss of the whole set before the
        first step and 20 times on the way, always with the same draws.
        """
        targets = statistics.required_targets()
        builder = HistoryBuilder()
        optimizer = torch.optim.Adam([prior.logarithms], lr=self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.n_steps)
        seed = draw_seed(self.generator)  # of measurements, which so change no minibatch
        minibatches = _minibatches(len(statistics), self.batch_size, self.generator)

        def losses(
            places: torch.Tensor | slice,
            prior_precision: torch.Tensor,
            generator: torch.Generator | None,
        ) -> torch.Tensor:
            moments = statistics[places].moments(prior_precision).scaled(la.logit_scale)
            predicted = moments  # of numbers, which need no link
            if not la.trained_likelihood.is_gaussian:
                f_mu, f_var = of_classes(la.trained_likelihood, moments)
                predicted = [self._link(generator)(f_mu, f_var)]
            return la.trained_likelihood.nll(predicted, targets[places], la.sigma_noise)

        def measure(step: int) -> None:
            # Without the noise of minibatches and of other draws, steps can be compared.
            draws = torch.Generator().manual_seed(seed)
            prior_precision = prior.value().detach()
            starts = range(0, len(statistics), _ROWS)
            parts = [losses(slice(i, i + _ROWS), prior_precision, draws) for i in starts]
            builder.add(step, torch.cat(parts).double().mean().item(), prior_precision)

        def loss() -> torch.Tensor:
            return losses(next(minibatches), prior.value(), self.generator).mean()

        every = max(1, self.n_steps // _CHECKPOINTS)
        steps = descent(
            loss,
            [prior.logarithms],
            optimizer,
            n_steps=self.n_steps,
            description="[Minimizing validation loss]",
            progress_bar=self.progress_bar,
        )
        for step, _ in steps:
            if step:  # the first step is still to be taken, and torch wants it before the schedule
                schedule.step()
            if step % every == 0:
                measure(step)
        measure(self.n_steps)
        return builder.history()


def _minibatches(
    n_examples: int, batch_size: int, generator: torch.Generator | None
) -> Iterator[torch.Tensor]:
    """Draw random minibatches without end, with each example once a round."""
    device = None if generator is None else generator.device
    while True:
        order = torch.randperm(n_examples, generator=generator, device=device)
        yield from order.cpu().split(batch_size)
