"""Functions drawn from a posterior: each is one and the same for all batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laplace_lora_ext.models.running import exclusive
from laplace_lora_ext.predictive.posterior import Posterior, logits_with

Function = Callable[[Any], Tensor]
"""Takes a batch, and returns its logits or numbers `(B, C)`."""


class _Drawn(NamedTuple):
    """Logits of a few examples: the model's `(B, C)`, and draws' `(B, S, C)`."""

    f_mu: Tensor
    of_functions: Tensor


@dataclass(frozen=True, eq=False)
class Functions:
    """Draws of the weights, as functions of a batch.

    Parameters
    ----------
    la : Posterior
    weights : torch.Tensor
        `(S, parameters)` draws from the posterior
    """

    la: Posterior
    weights: Tensor

    @exclusive
    def linearised(self, batch: Any) -> Tensor:
        """Compute the linearised model's logits `(S, B, C)`, by one set of Jacobians.

        Each function is s (f(θ*) + J (θ - θ*)), with `logit_scale` s: over many draws,
        mean and covariance are those of `predictive_moments`, scaled by s, also between
        examples and between batches.
        """
        la = self.la
        la.check_model()
        parts = la.recorder.in_parts(batch, la.n_outputs, self._linearised_part)
        of_functions = torch.cat([part.of_functions for part in parts])
        return la.logit_scale * of_functions.transpose(0, 1)

    def _linearised_part(self, part: Any, _: slice) -> _Drawn:
        # J (θ - θ*) adds up over blocks, whose Jacobians come one after the other.
        sizes = [block.n_params for block in self.la.blocks]
        changes = (self.weights - self.la.mean).split(sizes, dim=1)
        products: list[Tensor] = []

        def multiply(index: int, jacobian: Tensor) -> None:
            block = self.la.blocks[index]
            change = changes[index].unflatten(1, block.shape)
            change = block.small_side_first(change)
            with torch.autocast(jacobian.device.type, enabled=False):
                product = torch.einsum("bcrd,srd->bsc", jacobian, change.to(jacobian))
            products.append(product.to(self.weights.device))

        f_mu = self.la.recorder.visit_jacobians(part, multiply)
        change_of_logits = torch.stack(products).sum(0)
        return _Drawn(f_mu, f_mu[:, None] + change_of_logits)

    @exclusive
    def sampled(self, batch: Any) -> Tensor:
        """Compute scaled logits `(S, B, C)` of the network with drawn weights."""
        la = self.la
        la.check_model()
        logits = [logits_with(la, drawn, batch) for drawn in self.weights]
        return la.logit_scale * torch.stack(logits)
