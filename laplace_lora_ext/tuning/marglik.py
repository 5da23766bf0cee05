"""The evidence of the training data, at the trained weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_lora_ext.messages import warn
from laplace_lora_ext.predictive.posterior import Members
from laplace_lora_ext.tuning.method import Trial, TuningHistory, TuningMethod, descent

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
        whether to show one
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

    It is smooth, has no noise and, for a layerwise prior, is a sum of functions of one
    variable each. That suits Rprop (Riedmiller & Braun, ICNN 1993), which adapts each
    variable's step to the signs of its slopes.

    References
    ----------
    Yang et al. (ICLR 2024), algorithm 2.
    """

    n_steps: int = 1000
    lr: float = 0.1
    tolerance: float = 1e-3
    optimize_sigma_noise: bool = False

    def _search(self, la: Members) -> TuningHistory:
        (posterior,) = la.members
        leaf, prior = self._leaves(la)
        logarithms = [leaf]
        log_noise = posterior.sigma_noise.detach().log().requires_grad_()
        if self.optimize_sigma_noise:
            logarithms.append(log_noise)
        optimizer = torch.optim.Rprop(logarithms, lr=self.lr, step_sizes=(1e-6, 1.0))
        trials: list[Trial] = []

        def loss() -> Tensor:
            noise = log_noise.exp() if self.optimize_sigma_noise else None
            prior_precision = prior()
            evidence = posterior.log_marginal_likelihood(prior_precision, noise)
            trials.append(
                Trial(
                    prior_precision,
                    sigma_noise=None if noise is None else noise.item(),
                    objective=evidence.item(),
                )
            )
            return -evidence

        steps = descent(
            loss,
            logarithms,
            optimizer,
            n_steps=self.n_steps,
            description="[Maximizing evidence]",
            progress_bar=self.progress_bar,
        )
        for _ in steps:
            if len(trials) > _WINDOW and _spread(trials) < self.tolerance:
                break
        else:
            loss()  # where the last step has led
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
