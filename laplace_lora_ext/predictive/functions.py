"""Functions drawn from a posterior: each is one and the same for all batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from laplace_lora_ext.messages import check_name
from laplace_lora_ext.models.running import exclusive
from laplace_lora_ext.models.weights import called_with
from laplace_lora_ext.passes.recorder import Recorder
from laplace_lora_ext.predictive.distributions import Drawable, as_values

Function = Callable[[Any], Tensor]
"""Takes a batch, and returns its logits or numbers `(B, C)`."""


class DrawableFunctions(Drawable, Protocol):
    """A Gaussian around a model's weights, to draw functions from."""

    recorder: Recorder
    mean: Tensor
    n_outputs: int


class _Drawn(NamedTuple):
    """Logits of a few examples: the model's `(B, C)`, and draws' `(B, S, C)`."""

    f_mu: Tensor
    of_functions: Tensor


@dataclass(frozen=True, eq=False)
class Functions:
    """Draws of the weights, as functions of a batch.

    Parameters
    ----------
    la : DrawableFunctions
    weights : torch.Tensor
        `(S, parameters)` draws from the posterior
    """

    la: DrawableFunctions
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
        logits = []
        for drawn in self.weights:
            values = as_values(la.blocks, drawn)
            with la.model.forward_passes():
                logits.append(called_with(la.model, la.blocks, values, batch))
        return la.logit_scale * torch.stack(logits)


@exclusive
def draw_functions(
    la: DrawableFunctions, n_samples: int, generator: torch.Generator | None
) -> Functions:
    """Draw functions from a posterior."""
    la.check_model()
    return Functions(la, la.sample(n_samples, generator))


def draw_function(
    la: DrawableFunctions,
    seed: int,
    pred_type: str,
) -> Function:
    """Draw one function, which the seed decides.

    Parameters and errors are those of `LoRALaplace.function`.
    """
    check_name("pred_type", pred_type, ["glm", "nn"])
    generator = torch.Generator(la.model.device).manual_seed(seed)
    functions = draw_functions(la, 1, generator)
    several = functions.linearised if pred_type == "glm" else functions.sampled

    def function(batch: Any) -> Tensor:
        inputs = la.model.unlabelled(la.model.inputs(batch))
        return la.model.in_places(several(inputs)[0], inputs)

    return function


@exclusive
def joint_samples(
    la: DrawableFunctions,
    x: Any,
    n_samples: int,
    generator: torch.Generator | None,
) -> Tensor:
    """Draw logits `(S, B, C)` of a batch, whose examples vary together."""
    return draw_functions(la, n_samples, generator).linearised(x)
