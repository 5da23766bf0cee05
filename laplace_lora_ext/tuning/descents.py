"""Descents: on the evidence of training data, and on the loss of validation data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import tqdm
from torch import Tensor

from laplace_lora_ext.messages import check_name, warn
from laplace_lora_ext.predicting import Predictor
from laplace_lora_ext.predictive.links import DEFAULT_LINK, LINKS, log_probabilities
from laplace_lora_ext.predictive.moments import draw_seed
from laplace_lora_ext.predictive.posterior import of_classes
from laplace_lora_ext.predictive.statistics import PredictiveStatistics
from laplace_lora_ext.tuning.method import (
    Trial,
    TuningHistory,
    TuningMethod,
    n_kinds_of,
    statistics_of_classes,
)

# Limits of a prior precision's logarithm: what float32 holds.
_LOWEST = math.log(torch.finfo(torch.float32).tiny)
_HIGHEST = math.log(torch.finfo(torch.float32).max)
_WINDOW = 10  # steps over which the evidence must be steady
_CHECKPOINTS = 20  # how often the whole validation loss is measured
_SEED = 0  # of draws
_ROWS = 256  # examples whose logits are sampled at once


@dataclass(frozen=True, kw_only=True, eq=False)
class _Descent(TuningMethod):
    """Follows a gradient in the logarithms of prior precisions."""

    n_steps: int = 1000
    lr: float = 0.1

    def _leaves(self, la: Predictor) -> tuple[Tensor, Callable[[], Tensor]]:
        """Return what a descent changes, and a function that makes a prior of it.

        These are logarithms of factors, one for each kind of weight or as many as the
        start has numbers.
        """
        start = self._start(la).log()
        kinds = self._kinds(la)
        places = torch.arange(len(start)) if kinds is None else kinds
        places = places.to(start.device)
        logarithms = start.new_zeros(n_kinds_of(places), requires_grad=True)

        def prior_precision() -> Tensor:
            return (start + logarithms[places]).clamp(_LOWEST, _HIGHEST).exp()

        return logarithms, prior_precision


@dataclass(frozen=True, kw_only=True, eq=False)
class Marglik(_Descent):
    """Maximise the evidence (log marginal likelihood), without further data.

    Parameters
    ----------
    init_prior_prec : float or torch.Tensor, default=1.0
        as for `TuningMethod`
    prior_structure : {"scalar", "kind", "layerwise", "diag"}, optional
        as for `TuningMethod`
    progress_bar : bool, default=False
        whether to show one
    n_steps : int, default=1000
        how many steps at most
    lr : float, default=0.1
        first step in the logarithm of the prior precision
    tolerance : float, default=1e-3
        stop when the evidence varies by less than this over ten steps, in nats; 0 takes
        all steps

    Warns
    -----
    UserWarning
        If the evidence has not converged.

    Notes
    -----
    The evidence at the trained weights often chooses a smaller prior precision, hence a
    broader posterior, than validation data would. With a layerwise prior it may raise a
    block's prior precision without bound, so that the block stays at its MAP value.

    It is smooth, has no noise and, for a layerwise prior, is a sum of functions of one
    variable each. That suits Rprop (Riedmiller & Braun, ICNN 1993), which adapts each
    variable's step to the signs of its slopes.

    References
    ----------
    Yang et al. (ICLR 2024), algorithm 2.
    """

    tolerance: float = 1e-3

    def _search(self, la: Predictor) -> TuningHistory:
        (posterior,) = la.members
        logarithms, prior = self._leaves(la)
        optimizer = torch.optim.Rprop([logarithms], lr=self.lr, step_sizes=(1e-6, 1.0))
        trials: list[Trial] = []

        def evidence() -> Tensor:
            prior_precision = prior()
            value = posterior.log_marginal_likelihood(prior_precision)
            trials.append(Trial(prior_precision, objective=value.item()))
            return value

        title = "[Maximizing evidence]"
        for _ in tqdm.trange(self.n_steps, desc=title, disable=not self.progress_bar):
            value = evidence()
            if len(trials) > _WINDOW and _spread(trials) < self.tolerance:
                break
            optimizer.zero_grad()
            value.neg().backward()
            optimizer.step()
        else:
            evidence()  # where the last step has led
            if self.tolerance > 0:
                warn(
                    f"The evidence has not converged in {self.n_steps} steps: it "
                    f"varied by {_spread(trials):.3g} nats over the last ten. Raise "
                    "n_steps or lr."
                )
        return TuningHistory(trials, choice=len(trials) - 1)


def _spread(trials: list[Trial]) -> float:
    """Return by how much the evidence varied over the last ten steps."""
    # Ten steps lie between eleven values.
    recent = [trial.objective for trial in trials[-_WINDOW - 1 :]]
    return max(recent) - min(recent)


@dataclass(frozen=True, kw_only=True, eq=False)
class ValGD(_Descent):
    """Descend along the gradient of the validation data's loss.

    For classes and "lowrank_kron" alone.

    Parameters
    ----------
    init_prior_prec : float or torch.Tensor, default=1.0
        as for `TuningMethod`
    prior_structure : {"scalar", "kind", "layerwise", "diag"}, optional
        as for `TuningMethod`
    progress_bar : bool, default=False
        whether to show one
    val_loader : DataLoader, iterable or PredictiveStatistics
        validation data with labels. They pass through the model only once, and with
        their statistics not at all. `PredictiveStatistics` says how much memory they
        take
    link_approx : {"mean_field", "probit", "mc"}, default="mean_field"
        link for the predictions to score: choose the one that you predict with. The
        paper's is "mc"
    n_samples : int, default=100
        samples of the logits, with "mc"
    n_steps : int, default=1000
        steps of Adam
    lr : float, default=0.1
        Adam's first step in the logarithm of the prior precision
    batch_size : int, default=4
        examples in a minibatch
    generator : torch.Generator, optional
        for minibatches and samples; if omitted, every call uses the same

    Raises
    ------
    ValueError
        If the data are empty, have no labels, or are statistics of another fit.
    NotImplementedError
        For numbers, and for another structure than "lowrank_kron".

    References
    ----------
    Yang et al. (ICLR 2024), algorithm 3.
    """

    val_loader: Iterable[Any] | PredictiveStatistics
    link_approx: str = DEFAULT_LINK
    n_samples: int = 100
    batch_size: int = 4
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("link_approx", self.link_approx, LINKS)

    def _search(self, la: Predictor) -> TuningHistory:
        """Descend along stochastic gradients in the logarithms of the prior.

        Unlike the paper's constant step size, this one falls to 0 along half a cosine,
        so that the last steps average over minibatches. The history is the loss of the
        whole set before the first step and 20 times on the way, always with the same
        draws.
        """
        (posterior,) = la.members
        logarithms, prior = self._leaves(la)
        statistics = statistics_of_classes(
            posterior, self.val_loader, self.link_approx, self.progress_bar
        )
        generator = self.generator or torch.Generator().manual_seed(_SEED)
        # Of measurements, which so change no minibatch.
        seed = draw_seed(generator)
        n_examples = len(statistics)
        minibatches = _minibatches(n_examples, self.batch_size, generator)
        trials: list[Trial] = []

        def losses(places: Tensor | slice, draws: torch.Generator) -> Tensor:
            part = statistics[places]
            moments = of_classes(posterior.task, part.moments(prior()))
            link = self.link_approx
            log_p = log_probabilities(moments, link, self.n_samples, draws)
            return posterior.task.nll(log_p, part.required_targets())

        @torch.no_grad()
        def measure() -> None:
            # Without the noise of minibatches and of other draws, steps can be
            # compared.
            draws = torch.Generator().manual_seed(seed)
            starts = range(0, n_examples, _ROWS)
            parts = [losses(slice(start, start + _ROWS), draws) for start in starts]
            mean = torch.cat(parts).double().mean().item()
            trials.append(Trial(prior(), objective=mean))

        optimizer = torch.optim.Adam([logarithms], lr=self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.n_steps)
        every = max(1, self.n_steps // _CHECKPOINTS)
        title = "[Minimizing validation loss]"
        steps = tqdm.trange(self.n_steps, desc=title, disable=not self.progress_bar)
        # Of the backward pass.
        with torch.autocast(statistics.f_mu.device.type, enabled=False):
            for step in steps:
                if step % every == 0:
                    measure()
                optimizer.zero_grad()
                losses(next(minibatches), generator).mean().backward()
                optimizer.step()
                schedule.step()
            measure()
        return TuningHistory.of_losses(trials)


def _minibatches(
    n_examples: int, batch_size: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Draw random minibatches without end, with each example once a round."""
    while True:
        order = torch.randperm(n_examples, generator=generator, device=generator.device)
        yield from order.cpu().split(batch_size)
