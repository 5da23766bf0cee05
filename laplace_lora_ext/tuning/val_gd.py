"""Gradient descent on the loss of validation data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace_lora_ext.draws import draw_seed
from laplace_lora_ext.messages import check_name
from laplace_lora_ext.models.running import as_tensor
from laplace_lora_ext.predictive.links import (
    DEFAULT_LINK,
    LINKS,
    log_probabilities,
    monte_carlo,
)
from laplace_lora_ext.predictive.moments import Moments, standard_normal
from laplace_lora_ext.predictive.posterior import Members, of_classes
from laplace_lora_ext.predictive.statistics import (
    PredictiveStatistics,
    has_statistics,
    statistics_of,
)
from laplace_lora_ext.tasks.task import Task
from laplace_lora_ext.tuning.losses import NoiseSquares
from laplace_lora_ext.tuning.method import (
    Prior,
    Trial,
    TuningHistory,
    TuningMethod,
    descent,
    unit_of_priors,
)

_CHECKPOINTS = 20  # how often the whole validation loss is measured
_SEED = 0  # of draws
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
        For another structure than "lowrank_kron".

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
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("link_approx", self.link_approx, LINKS)

    def _search(self, la: Members) -> TuningHistory:
        (posterior,) = la.members
        task = posterior.task
        unit = unit_of_priors(posterior) if task.has_noise else 1.0
        logarithms, prior = self._leaves(la, unit)
        posterior.sigma_noise = torch.ones(())
        if not has_statistics(posterior):
            raise NotImplementedError(
                'method="val_gd" needs hessian_structure="lowrank_kron": use '
                '"gridsearch" instead.'
            )
        statistics = statistics_of(
            posterior, self.val_loader, self.link_approx, self.progress_bar
        )
        log_noise = torch.zeros((), dtype=torch.float64)  # of classes, which have none
        if task.has_noise:
            # The best noise of the start: the data's own scale.
            start = prior().detach()
            score = NoiseSquares(posterior.n_outputs)
            terms = score.terms(
                [posterior], [statistics.moments(start)], statistics.required_targets()
            )
            noise = score.best(start, terms.sum(0), len(statistics)).sigma_noise
            log_noise = as_tensor(noise).double().log().requires_grad_()

        def losses(places: Tensor | slice, draws: torch.Generator) -> Tensor:
            part = statistics[places]
            moments = of_classes(task, part.moments(prior()))
            predicted = self._predicted(moments, task, log_noise, draws)
            return task.nll(predicted, part.required_targets(), log_noise.exp())

        # Of the backward pass.
        with torch.autocast(statistics.f_mu.device.type, enabled=False):
            return self._descend(losses, len(statistics), logarithms, prior, log_noise)

    def _predicted(
        self, moments: Moments, task: Task, log_noise: Tensor, draws: torch.Generator
    ) -> list[Tensor]:
        """Predict what a task takes, by moments at a noise of 1."""
        f_mu = moments.f_mu
        if task.has_noise:
            # All variances are relative to the noise's.
            return [f_mu, (2 * log_noise).exp().to(f_mu) * moments.f_var]
        if self.link_approx == "mc":
            # Unlike predictions, each example has draws of its own: a minibatch's
            # errors average out.
            noise = standard_normal((self.n_samples, *f_mu.shape), f_mu, draws)
            return [monte_carlo(f_mu, moments.f_var, noise)]
        return [log_probabilities(moments, self.link_approx)]

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
        trials: list[Trial] = []

        @torch.no_grad()
        def measure() -> None:
            # Without the noise of minibatches and of other draws, steps can be
            # compared.
            draws = torch.Generator().manual_seed(seed)
            starts = range(0, n_examples, _ROWS)
            parts = [losses(slice(start, start + _ROWS), draws) for start in starts]
            mean = torch.cat(parts).double().mean().item()
            noise = log_noise.exp().item()
            trials.append(
                Trial(
                    prior() / noise**2,
                    sigma_noise=noise if has_noise else None,
                    objective=mean,
                )
            )

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
            if step % every == 0:
                measure()
        measure()
        return TuningHistory.of_losses(trials)


def _minibatches(
    n_examples: int, batch_size: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Draw random minibatches without end, with each example once a round."""
    while True:
        order = torch.randperm(n_examples, generator=generator, device=generator.device)
        yield from order.cpu().split(batch_size)
