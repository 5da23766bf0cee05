"""The evidence of the training data, at the trained weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_lora_ext.messages import warn
from laplace_lora_ext.processes.exchange import of_first
from laplace_lora_ext.tuning.method import (
    HistoryBuilder,
    Searched,
    Tunable,
    TuningHistory,
    TuningMethod,
    descent,
)

_WINDOW = 10  # steps over which the evidence must be steady


@dataclass(frozen=True, kw_only=True, eq=False)
class Marglik(TuningMethod):
    """Maximise the evidence (log marginal likelihood), without further data.

    Parameters
    ----------
    init_prior_prec : float or torch.Tensor, default=1.0
        as for `TuningMethod`
    prior_structure : {"scalar", "kind", "layerwise", "diag"}, optional
        as for `TuningMethod`
    progress_bar : bool, default=False
    n_steps : int, default=1000
        how many steps at most
    lr : float, default=0.1
        first step in the logarithm of the prior precision
    tolerance : float, default=1e-3
        stop when the evidence varies by less than this over ten steps, in nats; 0 takes
        all steps
    optimize_sigma_noise : bool, default=False
        for regression: let the evidence choose `sigma_noise` too

    Warns
    -----
    UserWarning
        If the evidence has not converged.

    Notes
    -----
    The evidence at the trained weights often chooses a smaller prior precision, hence a
    broader posterior, than validation data would. With a layerwise prior it may raise a
    block's prior precision without bound, so that the block stays at its MAP value. Of
    dozens of targets of a regression it makes too much noise: a Kronecker product has
    more directions than there are targets, for whose determinant the evidence pays by
    noise.

    References
    ----------
    Yang et al. (ICLR 2024), algorithm 2.
    """

    n_steps: int = 1000
    lr: float = 0.1
    tolerance: float = 1e-3
    optimize_sigma_noise: bool = False

    def _search(self, la: Tunable) -> TuningHistory:
        prior = self._searched(la)
        log_noise = None
        if self.optimize_sigma_noise:
            log_noise = la.sigma_noise.detach().log().requires_grad_()
        history = self._climb(la, prior, log_noise)
        la.prior_precision = prior.value().detach()
        if log_noise is not None:
            # Ranks may differ in the last digit.
            noise = of_first(log_noise.detach().exp())
            la.sigma_noise = noise.to(la.model.device)
        return history

    def _climb(
        self,
        la: Tunable,
        prior: Searched,
        log_noise: Tensor | None,
    ) -> TuningHistory:
        """Climb the evidence in logarithms of the prior and perhaps the noise.

        The evidence is smooth, has no noise and, for a layerwise prior, is a sum of
        functions of one variable each. That suits Rprop (Riedmiller & Braun, ICNN
        1993), which adapts each variable's step to the signs of its slopes.
        """
        logarithms = [prior.logarithms]
        if log_noise is not None:
            logarithms.append(log_noise)
        optimizer = torch.optim.Rprop(logarithms, lr=self.lr, step_sizes=(1e-6, 1.0))

        def loss() -> Tensor:
            sigma_noise = None if log_noise is None else log_noise.exp()
            return -la.log_marginal_likelihood(prior.value(), sigma_noise)

        builder = HistoryBuilder()
        spread = math.inf
        steps = descent(
            loss,
            logarithms,
            optimizer,
            n_steps=self.n_steps,
            description="[Maximizing evidence]",
            progress_bar=self.progress_bar,
        )
        for step, value in steps:
            builder.add(step, -value.item(), prior.value())
            # Ten steps lie between eleven values.
            recent = builder.objectives[-_WINDOW - 1 :]
            if len(recent) > _WINDOW:
                spread = max(recent) - min(recent)
                if spread < self.tolerance:
                    break
        else:
            if self.tolerance > 0:
                warn(
                    f"The evidence has not converged in {self.n_steps} steps: it "
                    f"varied by {spread:.3g} nats over the last ten. Raise n_steps or "
                    "lr."
                )
        return builder.history()
