"""Gradient descent on the loss of validation texts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import tqdm

from laplace_lora_ext.messages import naming
from laplace_lora_ext.models.batches import named_batches
from laplace_lora_ext.models.weights import LoRAWeights, Values
from laplace_lora_ext.processes.exchange import gathered, one_generator
from laplace_lora_ext.text.draws import Noise
from laplace_lora_ext.text.joined import TextPasses
from laplace_lora_ext.text.on_grid import TextPosterior
from laplace_lora_ext.tuning.history import REACH, Recorder, TuningHistory
from laplace_lora_ext.tuning.method import TuningMethod


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenValGD(TuningMethod):
    """Follow the gradient of the negative log-likelihood of validation texts' tokens.

    `laplace_lora_ext.ValGD` for tokens, of use with `prior_structure="layerwise"`: for a scalar,
    `TokenGridSearch` takes fewer passes. The loss is that of a labelled token under the mixture
    over draws of the linearised model, with the same draws in every step. Each step takes all
    texts; a text takes two forward passes and, for each draw, a product with the Jacobian and a
    backward pass.

    Parameters
    ----------
    init_prior_prec, prior_structure, progress_bar
        as for `TuningMethod`
    val_loader : DataLoader or iterable
        batches of texts with labels; memory holds about a dozen times the logits of a batch
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

    def _search(self, la: TextPosterior) -> TuningHistory:  # pyright: ignore[reportIncompatibleMethodOverride]
        logarithm = self._start(la).log().requires_grad_()
        noise = Noise.seeded(self.n_samples, one_generator(self.generator))
        optimizer = torch.optim.Adam([logarithm], lr=self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.n_steps)
        recorder = Recorder()
        steps = range(self.n_steps + 1)
        for step in tqdm.tqdm(steps, "[Minimizing validation loss]", disable=not self.progress_bar):
            loss, logarithm.grad = self._loss_and_gradient(la, noise, logarithm)
            recorder.add(step, loss, logarithm.detach().exp())
            optimizer.step()
            logarithm.detach().clamp_(*REACH)
            schedule.step()
        history = recorder.history()
        la.prior_precision = history.prior_precision[history.objective.argmin()]
        return history

    def _loss_and_gradient(
        self, la: TextPosterior, noise: Noise, logarithm: torch.Tensor
    ) -> tuple[float, torch.Tensor]:
        """Mean loss of a token, and its gradient in the logarithm of the prior precision."""
        loss, n_tokens, gradient = 0.0, 0, torch.zeros_like(logarithm)
        for name, batch in named_batches(self.val_loader):
            with naming(name), la.model.prepared():
                of_batch, n, directions = _loss_and_slopes(la, batch, noise, logarithm)
            loss, n_tokens = loss + of_batch, n_tokens + n
            gradient += directions
        of_ranks = gathered((loss, n_tokens, gradient))
        n_tokens = sum(n for _, n, _ in of_ranks)
        if not n_tokens:
            raise ValueError("The loader has no data.")
        whole = torch.stack([part.to(logarithm.device) for *_, part in of_ranks]).sum(0)
        return sum(part for part, *_ in of_ranks) / n_tokens, whole / n_tokens


def _loss_and_slopes(
    la: TextPosterior, batch: Any, noise: Noise, logarithm: torch.Tensor
) -> tuple[float, int, torch.Tensor]:
    """A batch's loss, summed over tokens, how many there are, and the loss's gradient.

    A draw's logits are `f + J δ`, so the gradient in δ is `Jᵀ` of that in the logits, by a backward
    pass at the trained weights. What δ is under a prior, autograd knows by itself.
    """
    logarithm = logarithm.detach().requires_grad_()
    with torch.enable_grad():
        precision = la.H * la._H_factor.detach() + logarithm.exp().to(la.H.deltas)
        directions = list(noise.directions(precision, la.blocks))
    detached = [[part.detach() for part in direction] for direction in directions]
    with torch.no_grad():
        f, tokens = la.tokens(batch)
        passes = TextPasses(la.model, la.blocks, batch)
        drawn = passes.drawn(la.way(batch), detached, noise.n_samples, f)
        log_p = [logits.log_softmax(-1) for logits in drawn]
        of_label = torch.stack([part.gather(-1, tokens[:, None]).squeeze(-1) for part in log_p])
        loss = math.log(noise.n_samples) * len(tokens) - of_label.logsumexp(0).sum().item()
    weights = LoRAWeights(la.model, la.blocks)
    leaves = [value.detach().requires_grad_() for value in weights.values]
    with torch.enable_grad():
        logits = weights.run(batch, leaves)
        for share, part, direction in zip(of_label.softmax(0), log_p, directions, strict=True):
            slope = part.exp()
            slope[torch.arange(len(tokens)), tokens] -= 1
            gradients = torch.autograd.grad(
                logits, leaves, share[:, None] * slope, retain_graph=True, allow_unused=True
            )
            _product(gradients, direction).backward(retain_graph=True)
    assert logarithm.grad is not None
    return loss, len(tokens), logarithm.grad


def _product(gradients: Iterable[torch.Tensor | None], direction: Values) -> torch.Tensor:
    parts = zip(gradients, direction, strict=True)
    return sum(((g.to(d) * d).sum().cpu() for g, d in parts if g is not None), torch.zeros(()))
