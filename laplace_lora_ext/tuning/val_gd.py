"""Gradient descent on the loss of validation data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace_lora_ext.likelihoods import Likelihood
from laplace_lora_ext.predictive.distributions import of_classes
from laplace_lora_ext.predictive.links import (
    DEFAULT_LINK,
    Link,
    mean_field,
    probit,
    sampled,
)
from laplace_lora_ext.predictive.statistics import PredictiveStatistics
from laplace_lora_ext.tuning.history import TuningHistory
from laplace_lora_ext.tuning.method import (
    Searched,
    TuningMethod,
    descent,
    draw_seed,
)
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
        prior = self._searched(la)
        is_regression = la.trained_likelihood.is_gaussian
        if is_regression:
            prior = replace(prior, start=prior.start * unit_of_priors(la))
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
        log_noise = None
        if is_regression:
            # The best noise of the start: the data's own scale.
            moments = statistics.moments(prior.value().detach())
            score = NoiseSquares(la.n_outputs)
            terms = score.terms([la], [moments], statistics.required_targets())
            noise = score.best(terms.sum(0), len(statistics)).sigma_noise
            log_noise = torch.tensor(noise, dtype=torch.float64).log().requires_grad_()
        losses = _Losses(
            la.trained_likelihood, statistics, prior, log_noise, self._link
        )
        # Of the backward pass.
        with torch.autocast(statistics.f_mu.device.type, enabled=False):
            return self._descend(losses)

    def _link(self, generator: torch.Generator) -> Link:
        return _SMOOTH.get(self.link_approx) or sampled(self.n_samples, generator)

    def _descend(self, losses: _Losses) -> TuningHistory:
        """Descend along stochastic gradients in the logarithms of prior and noise.

        Unlike the paper's constant step size, this one falls to 0 along half a cosine,
        so that the last steps average over minibatches. The history is the loss of the
        whole set before the first step and 20 times on the way, always with the same
        draws.
        """
        leaves = [losses.prior.logarithms]
        if losses.log_noise is not None:
            leaves.append(losses.log_noise)
        optimizer = torch.optim.Adam(leaves, lr=self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=self.n_steps
        )
        generator = self.generator or torch.Generator().manual_seed(_SEED)
        # Of measurements, which so change no minibatch.
        seed = draw_seed(generator)
        n_examples = len(losses.statistics)
        minibatches = _minibatches(n_examples, self.batch_size, generator)

        def loss() -> Tensor:
            return losses.of(next(minibatches), generator).mean()

        every = max(1, self.n_steps // _CHECKPOINTS)
        measured = [*range(0, self.n_steps, every), self.n_steps]
        rows: list[Tensor] = []
        outcomes: list[Outcome] = []

        def measure() -> None:
            noise = losses.noise
            rows.append(losses.prior.value().detach() / noise**2)
            chosen = None if losses.log_noise is None else noise.item()
            outcomes.append(Outcome(losses.of_all(seed), sigma_noise=chosen))

        steps = descent(
            loss,
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


@dataclass(frozen=True)
class _Losses:
    """Negative log-likelihoods of validation data, for the present prior and noise."""

    likelihood: Likelihood
    statistics: PredictiveStatistics
    prior: Searched
    log_noise: Tensor | None  # (), of a regression
    link: Callable[[torch.Generator], Link]  # that draws from a generator

    @property
    def noise(self) -> Tensor:
        """Compute the noise `()`; 1 of classes, which have none."""
        if self.log_noise is None:
            return torch.ones((), dtype=torch.float64)
        return self.log_noise.detach().exp()

    def of(self, places: Tensor | slice, generator: torch.Generator) -> Tensor:
        """Compute the losses of these examples, `(B,)`."""
        of_model = self.statistics[places].moments(self.prior.value())
        targets = self.statistics.required_targets()[places]
        if self.log_noise is not None:
            # The prior is that of a noise of 1: then all variances are relative to the
            # noise's.
            noise = self.log_noise.exp()
            f_mu, f_var = of_model
            predicted = [f_mu, noise.square().to(f_var) * f_var]
            return self.likelihood.nll(predicted, targets, noise)
        log_p = self.link(generator)(of_classes(self.likelihood, of_model))
        return self.likelihood.nll([log_p], targets, self.noise)

    @torch.no_grad()
    def of_all(self, seed: int) -> float:
        """Compute the mean over all examples, with the same draws in every call."""
        # Without the noise of minibatches and of other draws, steps can be compared.
        draws = torch.Generator().manual_seed(seed)
        parts: list[Tensor] = []
        for start in range(0, len(self.statistics), _ROWS):
            rows = slice(start, start + _ROWS)
            parts.append(self.of(rows, draws))
        return torch.cat(parts).double().mean().item()


def _minibatches(
    n_examples: int, batch_size: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Draw random minibatches without end, with each example once a round."""
    while True:
        order = torch.randperm(n_examples, generator=generator, device=generator.device)
        yield from order.cpu().split(batch_size)
