"""Gradient descent on the loss of validation data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace_lora_ext.predictive.distributions import of_classes
from laplace_lora_ext.predictive.links import (
    DEFAULT_LINK,
    Link,
    mean_field,
    probit,
    sampled,
)
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
from laplace_lora_ext.tuning.noise import unit_of_priors
from laplace_lora_ext.tuning.samples import MOST_BYTES, statistics_within
from laplace_lora_ext.tuning.scales import WithNoise

_SMOOTH: dict[str, Link] = {"probit": probit, "mean_field": mean_field}
_CHECKPOINTS = 20  # how often the whole validation loss is measured
_SEED = 0  # of the examples, where there are too many
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
                'method="val_gd" needs one of the links "mc", "probit" and '
                f'"mean_field", not {self.link_approx!r}.'
            )

    def _search(self, la: Tunable) -> TuningHistory:
        is_gaussian = la.trained_likelihood.is_gaussian
        prior = self._searched(la)
        if is_gaussian:
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
        # Of the backward pass.
        with torch.autocast(statistics.f_mu.device.type, enabled=False):
            # Of classes, which have none.
            log_noise = torch.zeros((), dtype=torch.float64)
            if is_gaussian:
                log_noise = _best_log_noise(la, statistics, prior).requires_grad_()
            losses = _Losses(la, statistics, prior, log_noise, self._link)
            history = self._descend(losses, prior)
        best = history.objective.argmin()
        if history.sigma_noise is not None:
            la.sigma_noise = history.sigma_noise[best].item()
        la.prior_precision = history.prior_precision[best]
        return history

    def _link(self, generator: torch.Generator | None) -> Link:
        return _SMOOTH.get(self.link_approx) or sampled(self.n_samples, generator)

    def _descend(
        self,
        losses: _Losses,
        prior: Searched,
    ) -> TuningHistory:
        """Descend along stochastic gradients in the logarithms of prior and noise.

        Unlike the paper's constant step size, this one falls to 0 along half a cosine,
        so that the last steps average over minibatches. The history is the loss of the
        whole set before the first step and 20 times on the way, always with the same
        draws.
        """
        log_noise = losses.log_noise
        leaves = [prior.logarithms]
        if log_noise.requires_grad:
            leaves.append(log_noise)
        optimizer = torch.optim.Adam(leaves, lr=self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=self.n_steps
        )
        # Of measurements, which so change no minibatch.
        seed = draw_seed(self.generator)
        n_examples = len(losses.statistics)
        minibatches = _minibatches(n_examples, self.batch_size, self.generator)
        builder = HistoryBuilder()
        noises: list[float] = []

        def measure(step: int) -> None:
            noise = log_noise.detach().exp().item()
            prior_precision = prior.value().detach() / noise**2
            builder.add(step, losses.of_all(seed), prior_precision)
            noises.append(noise)

        def loss() -> Tensor:
            return losses.of(next(minibatches), self.generator).mean()

        every = max(1, self.n_steps // _CHECKPOINTS)
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
            if step % every == 0:
                measure(step)
        measure(self.n_steps)
        history = builder.history()
        if not log_noise.requires_grad:
            return history
        return replace(history, sigma_noise=torch.tensor(noises, dtype=torch.float64))


@dataclass(frozen=True)
class _Losses:
    """Negative log-likelihoods of validation data, for the present prior and noise."""

    la: Tunable
    statistics: PredictiveStatistics
    prior: Searched
    log_noise: Tensor  # ()
    link: Callable[[torch.Generator | None], Link]  # that draws from a generator

    def of(self, places: Tensor | slice, generator: torch.Generator | None) -> Tensor:
        """Compute the losses of these examples, `(B,)`."""
        of_model = self.statistics[places].moments(self.prior.value())
        targets = self.statistics.required_targets()[places]
        likelihood = self.la.trained_likelihood
        noise = self.log_noise.exp()
        if likelihood.is_gaussian:
            # The prior is that of a noise of 1: then all variances are relative to the
            # noise's.
            f_mu, f_var = of_model
            predicted = [f_mu, noise.square().to(f_var) * f_var]
            return likelihood.nll(predicted, targets, noise)
        moments = of_classes(likelihood, of_model.scaled(self.la.logit_scale))
        log_p = self.link(generator)(moments)
        return likelihood.nll([log_p], targets, noise)

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


def _best_log_noise(
    la: Tunable, statistics: PredictiveStatistics, prior: Searched
) -> Tensor:
    """Find the logarithm `()` of the noise that suits the start best.

    It is the data's own scale.
    """
    score = WithNoise(la.n_outputs)
    moments = statistics.moments(prior.value().detach())
    sums = score.terms(la, moments, statistics.required_targets()).sum(0)
    noise = score.best(sums, len(statistics)).sigma_noise
    assert noise is not None
    return torch.tensor(noise, dtype=torch.float64).log()


def _minibatches(
    n_examples: int, batch_size: int, generator: torch.Generator | None
) -> Iterator[Tensor]:
    """Draw random minibatches without end, with each example once a round."""
    device = None if generator is None else generator.device
    while True:
        order = torch.randperm(n_examples, generator=generator, device=device)
        yield from order.cpu().split(batch_size)
