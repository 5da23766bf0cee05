"""Gradient descent on the loss of validation data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace_lora_ext.predictive.links import (
    DEFAULT_LINK,
    Link,
    mean_field,
    probit,
    sampled,
)
from laplace_lora_ext.predictive.moments import AnyMoments
from laplace_lora_ext.predictive.posterior import of_classes
from laplace_lora_ext.predictive.statistics import PredictiveStatistics
from laplace_lora_ext.tuning.history import TuningHistory
from laplace_lora_ext.tuning.method import Prior, TuningMethod, descent, draw_seed
from laplace_lora_ext.tuning.noise import unit_of_priors
from laplace_lora_ext.tuning.samples import MOST_BYTES, statistics_within
from laplace_lora_ext.tuning.scales import NoiseSquares, Outcome

_SMOOTH: dict[str, Link] = {"probit": probit, "mean_field": mean_field}
_CHECKPOINTS = 20  # how often the whole validation loss is measured
_SEED = 0  # of draws, and of the examples where there are too many
_ROWS = 256  # examples whose logits it samples at once


@dataclass(frozen=True, kw_only=True, eq=False)
class ValGD(TuningMethod):
    """Descend along the gradient of the validation data's loss.

    For "lowrank_kron" alone.

    Of a regression the gradient is in the logarithm of `la.sigma_noise`, too, from the
    best noise of the start on. The prior precision is then relative to the noise, as
    for `GridSearch`.

    Parameters
    ----------
    init_prior_prec : float or torch.Tensor, default=1.0
        as for `TuningMethod`
    prior_structure : {"scalar", "kind", "layerwise", "diag"}, optional
        as for `TuningMethod`
    progress_bar : bool, default=False
    val_loader : DataLoader, iterable or PredictiveStatistics
        validation data with labels. They pass through the model only once, and with
        their statistics not at all
    link_approx : {"mean_field", "probit", "mc"}, default="mean_field"
        link for the predictions to score: choose the one that you predict with. The
        paper's is "mc"
    n_samples : int, default=100
        samples of the logits, with "mc"
    n_steps : int, default=1000
    lr : float, default=0.1
        Adam's first step in the logarithm of the prior precision
    batch_size : int, default=4
        examples in a minibatch
    max_bytes : int, default=2**32
        how much memory the statistics may take in each process. Where those of all
        examples take more, as many as fit are drawn at random, the same in every call
    generator : torch.Generator, optional
        for minibatches and samples; if omitted, every call uses the same

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
                'method="val_gd" needs one of the links "mc", "probit" and '
                f'"mean_field", not {self.link_approx!r}.'
            )

    def _search(self, la: Any) -> TuningHistory:
        is_regression = la.task.has_noise
        unit = unit_of_priors(la) if is_regression else 1.0
        logarithms, prior = self._leaves(la, unit)
        la.sigma_noise = 1.0
        statistics = statistics_within(
            la,
            self.val_loader,
            self.max_bytes,
            _SEED,
            self.progress_bar,
            self.link_approx,
        )
        if statistics is None:
            raise NotImplementedError(
                'method="val_gd" needs hessian_structure="lowrank_kron": use '
                '"gridsearch" instead.'
            )
        log_noise = torch.zeros((), dtype=torch.float64)  # of classes, which have none
        if is_regression:
            # The best noise of the start: the data's own scale.
            moments = statistics.moments(prior().detach())
            score = NoiseSquares(la.n_outputs)
            terms = score.terms([la], [moments], statistics.required_targets())
            noise = score.best(terms.sum(0), len(statistics)).sigma_noise
            log_noise = torch.tensor(noise).double().log().requires_grad_()

        def losses(places: Tensor | slice, draws: torch.Generator) -> Tensor:
            part = statistics[places]
            predicted = self._predicted(la, part.moments(prior()), log_noise, draws)
            targets = part.required_targets()
            return la.task.nll(predicted, targets, log_noise.exp())

        # Of the backward pass.
        with torch.autocast(statistics.f_mu.device.type, enabled=False):
            return self._descend(losses, len(statistics), logarithms, prior, log_noise)

    def _predicted(
        self, la: Any, moments: AnyMoments, log_noise: Tensor, draws: torch.Generator
    ) -> list[Tensor]:
        """Predict what a likelihood takes, by moments at a noise of 1."""
        if la.task.has_noise:
            # All variances are relative to the noise's.
            f_mu, f_var = moments
            return [f_mu, (2 * log_noise).exp().to(f_var) * f_var]
        link = _SMOOTH.get(self.link_approx) or sampled(self.n_samples, draws)
        return [link(of_classes(la.task, moments))]

    def _descend(
        self,
        losses: Callable[[Tensor | slice, torch.Generator], Tensor],
        n_examples: int,
        logarithms: Tensor,
        prior: Prior,
        log_noise: Tensor,
    ) -> TuningHistory:
        """Descend along stochastic gradients in the logarithms of prior and noise.

        Unlike the paper's constant step size, this one falls to 0 along half a cosine,
        so that the last steps average over minibatches. The history is the loss of the
        whole set before the first step and 20 times on the way, always with the same
        draws.
        """
        has_noise = log_noise.requires_grad
        leaves = [logarithms, log_noise] if has_noise else [logarithms]
        optimizer = torch.optim.Adam(leaves, lr=self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=self.n_steps
        )
        generator = self.generator or torch.Generator().manual_seed(_SEED)
        # Of measurements, which so change no minibatch.
        seed = draw_seed(generator)
        minibatches = _minibatches(n_examples, self.batch_size, generator)
        every = max(1, self.n_steps // _CHECKPOINTS)
        measured = [*range(0, self.n_steps, every), self.n_steps]
        rows: list[Tensor] = []
        outcomes: list[Outcome] = []

        @torch.no_grad()
        def measure() -> None:
            # Without the noise of minibatches and of other draws, steps can be
            # compared.
            draws = torch.Generator().manual_seed(seed)
            starts = range(0, n_examples, _ROWS)
            parts = [losses(slice(start, start + _ROWS), draws) for start in starts]
            mean = torch.cat(parts).double().mean().item()
            noise = log_noise.exp().item()
            rows.append(prior() / noise**2)
            outcomes.append(Outcome(mean, sigma_noise=noise if has_noise else None))

        steps = descent(
            lambda: losses(next(minibatches), generator).mean(),
            leaves,
            optimizer,
            n_steps=self.n_steps,
            description="[Minimizing validation loss]",
            progress_bar=self.progress_bar,
        )
        for step, _ in steps:
            # Torch wants the first step before the schedule's, and it comes later.
            if step:
                schedule.step()
            if step in measured:
                measure()
        measure()
        return replace(TuningHistory.of(rows, outcomes), step=torch.tensor(measured))


def _minibatches(
    n_examples: int, batch_size: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Draw random minibatches without end, with each example once a round."""
    while True:
        order = torch.randperm(n_examples, generator=generator, device=generator.device)
        yield from order.cpu().split(batch_size)
