"""Gradient descent on the loss of validation texts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import tqdm

from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.processes.exchange import gathered, one_generator
from laplace_lora_ext.text.draws import drawn, label_log_probs, mean_over_tokens
from laplace_lora_ext.tuning.history import REACH, Recorder, TuningHistory
from laplace_lora_ext.tuning.loss_search import draw_seed
from laplace_lora_ext.tuning.method import TuningMethod


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenValGD(TuningMethod):
    """Follow the gradient of the negative log-likelihood of validation texts' tokens.

    `laplace_lora_ext.ValGD` for tokens, of use with `prior_structure="layerwise"`: for a scalar,
    `TokenGridSearch` takes fewer passes. The loss is that of a labelled token under the mixture
    over draws, with the same noise in every step. Each step takes all texts, and for each draw two
    forward passes and a backward pass.

    Parameters
    ----------
    init_prior_prec, prior_structure, progress_bar
        as for `TuningMethod`
    val_loader : DataLoader or iterable
        batches of texts with labels
    n_samples : int, default=10
        how many draws
    n_steps : int, default=20
    lr : float, default=0.3
        Adam's first step in the logarithm of the prior precision; it falls along half a cosine
    generator : torch.Generator, optional
        for the draws

    Raises
    ------
    ValueError
        If the data are empty or without labels, or the loss is not a number.

    References
    ----------
    Yang et al. (ICLR 2024), algorithm 3, for classes.
    """

    val_loader: Iterable[Any]
    n_samples: int = 10
    n_steps: int = 20
    lr: float = 0.3
    generator: torch.Generator | None = None

    def _search(self, la: Posterior) -> TuningHistory:
        logarithm = self._start(la).log().requires_grad_()
        seed = draw_seed(one_generator(self.generator))
        optimizer = torch.optim.Adam([logarithm], lr=self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.n_steps)
        recorder = Recorder()
        steps = range(self.n_steps + 1)
        for step in tqdm.tqdm(steps, "[Minimizing validation loss]", disable=not self.progress_bar):
            loss, logarithm.grad = self._loss_and_gradient(la, logarithm, seed)
            recorder.add(step, loss, logarithm.exp())
            optimizer.step()
            logarithm.detach().clamp_(*REACH)
            schedule.step()
        history = recorder.history()
        la.prior_precision = history.prior_precision[history.objective.argmin()]
        return history

    def _loss_and_gradient(
        self, la: Posterior, logarithm: torch.Tensor, seed: int
    ) -> tuple[float, torch.Tensor]:
        """Mean loss of a token, and its gradient in the logarithm of the prior precision."""
        la.prior_precision = logarithm.exp()
        draws = list(drawn(la, self.n_samples, seed))
        leaves = [[value.detach().requires_grad_() for value in values] for values in draws]

        def of_batch(batch: Any) -> torch.Tensor:
            with torch.no_grad():
                log_probs = torch.stack(list(label_log_probs(la, batch, leaves)))
            # The gradient of the mixture, with the graph of one draw in memory at a time.
            shares = log_probs.softmax(0)
            for share, part in zip(shares, label_log_probs(la, batch, leaves), strict=True):
                (-share @ part).backward()
            return math.log(self.n_samples) - log_probs.logsumexp(0)

        loss, n_tokens, _ = mean_over_tokens(la, self.val_loader, of_batch)
        reached = [
            (value, leaf.grad)
            for values, of_draw in zip(draws, leaves, strict=True)
            for value, leaf in zip(values, of_draw, strict=True)
            if leaf.grad is not None
        ]
        values, gradients = zip(*reached, strict=True)
        (gradient,) = torch.autograd.grad(values, logarithm, gradients)
        of_ranks = [part.to(gradient) for part in gathered(gradient)]
        return loss, torch.stack(of_ranks).sum(0) / n_tokens
