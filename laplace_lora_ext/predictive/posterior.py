"""A Gaussian over the weights of one model, and the moments of logits under it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from laplace.baselaplace import ParametricLaplace
from torch import Tensor, nn

from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.running import exclusive
from laplace_lora_ext.models.weights import Block, Values, replace_weights, values_of
from laplace_lora_ext.passes.recorder import Directions, Recorder, every_output
from laplace_lora_ext.predictive.learnt_variance import LearntVariance
from laplace_lora_ext.predictive.links import OF_DIFFERENCES
from laplace_lora_ext.predictive.moments import Contrasts, Moments, padded_to
from laplace_lora_ext.tasks.task import Task

WITHOUT_VARIANCE = 1e12
"""A prior precision under which weights don't vary, of numbers relative to the unit."""

# Of drawn weights that are in memory at once: 64 MB in float32, or one draw.
_NUMBERS = 2**24


@dataclass(frozen=True, eq=False)
class Hyperparameters:
    """What a search sets, all at once, named as the attributes of a posterior.

    Attributes
    ----------
    prior_precision : torch.Tensor
        of a mixture, a factor of its members'
    logit_scale : float, default=1.0
        of a mixture, a factor of its members'
    sigma_noise : torch.Tensor or float, optional
        None leaves it as it is
    """

    prior_precision: Tensor
    logit_scale: float = 1.0
    sigma_noise: Tensor | float | None = None


class Posterior(ParametricLaplace):
    """The host's posterior around one model, as far as other files need it.

    Attributes
    ----------
    model : LogitsModel
    blocks : list of Block
        the weights that it is over
    recorder : Recorder
        of passes through them
    mean : torch.Tensor
        `(parameters,)`
    prior_precision : torch.Tensor
        `(1,)`, `(blocks,)` or `(parameters,)`
    sigma_noise : torch.Tensor
        `()`, of a regression
    task : Task
        what the model was trained to predict
    n_data : int
        number of training examples
    n_outputs : int
        number of the model's outputs
    n_contrasts : int or None
        how many classes are compared with the most probable one; None for as many as
        matter
    logit_scale : float
        what predictions multiply the logits by
    learnt_variance : LearntVariance or None
        to predict without a backward pass
    H
        the curvature, without a prior; its type depends on the structure
    """

    model: LogitsModel
    blocks: list[Block]
    recorder: Recorder
    mean: Tensor
    prior_precision: Tensor
    sigma_noise: Tensor
    task: Task
    n_data: int
    n_outputs: int
    n_contrasts: int | None
    logit_scale: float
    learnt_variance: LearntVariance | None
    H: Any
    # Whether weights vary: not where a search has chosen a temperature alone.
    has_variance: bool

    predictive_statistics: Callable[..., Any]  # which "lowrank_kron" alone has
    for_model: Callable[[nn.Module], Any]  # of the same class

    def check_model(self) -> None:
        """Refuse a model that has changed since the fit."""
        raise NotImplementedError

    @exclusive
    def predictive_moments(
        self, x: Any, *, joint: bool = False
    ) -> Moments | tuple[Tensor, Tensor]:
        """Compute mean `(B, C)` and covariance `(B, C, C)` of a batch's logits.

        Neither link, noise nor `logit_scale` is in them: `la(moments)` applies these.

        Parameters
        ----------
        x : Mapping or torch.Tensor
            inputs of B examples, as for a call; with labels of tokens a row for each
        joint : bool, default=False
            one covariance of all examples together: a pair of tensors, `(B * C,)` and
            `(B * C, B * C)`
        """
        moments = self._moments(x, joint)
        return (moments.f_mu.flatten(), moments.covariance) if joint else moments

    def _moments(
        self, x: Any, joint: bool = False, contrasts: Contrasts | None = None
    ) -> Moments:
        """Compute moments of a batch's logits, or of contrasts; or take given ones.

        Moments of differences are refused where all logits are asked for.
        """
        if isinstance(x, Moments):
            if x.classes is not None and contrasts is None:
                raise ValueError(
                    "These moments tell of differences of logits alone, which the "
                    'links "mean_field" and "mc" read. For all else pass the batch, or '
                    'moments of predictive_statistics(..., link_approx="probit").'
                )
            if joint:
                raise ValueError(
                    "Moments hold no covariance between examples: pass the inputs."
                )
            return x.to(self.model.device, self.blocks[0].statistics_dtype)
        self.check_model()
        self.task.check_linearised()
        directions, n_directions = directions_of(self, contrasts)

        def of_part(part: Any, _: slice) -> Moments:
            f_mu, covariance = self._linearised(part, joint, directions)
            if contrasts is not None:  # of which parts need unlike numbers
                covariance = padded_to(covariance, n_directions)
            return Moments(f_mu, covariance)

        if not self.has_variance:
            with self.model.forward_passes():
                f_mu = self.model(x)
            # Pairs have two rewards in a fit, and a text has one.
            n = f_mu.shape[1] if contrasts is None else n_directions
            n *= len(f_mu) if joint else 1
            covariance = f_mu.new_zeros((n, n) if joint else (len(f_mu), n, n))
        else:
            with torch.no_grad():
                if joint:  # examples vary together: they can't come in parts
                    return Moments(*self._linearised(x, joint, directions))
                parts = self.recorder.predict(x, n_directions, of_part)
            f_mu, covariance = map(torch.cat, zip(*parts, strict=True))
        classes = None if contrasts is None else contrasts.classes(f_mu.detach())
        return Moments(f_mu, covariance, classes)

    def _linearised(
        self, part: Any, joint: bool, directions: Directions
    ) -> tuple[Tensor, Tensor]:
        """Compute mean `(B, C)` and covariance `(B, C, C)` or, joint, `(B * C, B * C)`.

        `directions` turns logits into S combinations of them, whose covariance it is.
        """
        Js, f_mu = self.recorder.jacobians(part, directions)
        covariance = self.functional_covariance if joint else self.functional_variance
        with torch.autocast(f_mu.device.type, enabled=False):
            return f_mu, covariance(Js)


def directions_of(la: Posterior, contrasts: Contrasts | None) -> tuple[Directions, int]:
    """Return what makes directions of logits, and how many there are at most."""
    if contrasts is None:
        return every_output, la.n_outputs
    return contrasts.directions, contrasts.most(la.n_outputs)


def sees_differences(la: Posterior, link_approx: str) -> bool:
    """Tell whether a link depends on differences of outputs alone."""
    is_softmax = la.task.predicted.sees_differences and la.n_outputs > 1
    return is_softmax and link_approx in OF_DIFFERENCES


def of_classes(task: Task, moments: Moments) -> Moments:
    """Turn a model's moments into those of classes' logits, as links take them."""
    if moments.classes is not None:
        return moments  # of a softmax, whose outputs they are
    f_mu, f_var = moments
    return Moments(task.class_logits(f_mu), task.class_covariance(f_var))


def moments_for(la: Posterior, x: Any, link_approx: str) -> Moments:
    """Return moments of scaled logits for a link, those of a batch or given ones.

    Given `Moments` serve every link, unless they are those of differences. Links that
    only see differences of logits get those from the most probable logit, by a pass for
    each of `Contrasts`. All other links get all logits, by C passes. Labels become two
    classes each: `(B, K, 2)` and `(B, K, 2, 2)`.
    """
    is_of_some = sees_differences(la, link_approx)
    contrasts = Contrasts(la.n_contrasts) if is_of_some else None
    moments = la._moments(x, contrasts=contrasts)
    return of_classes(la.task.predicted, moments).scaled(la.logit_scale)


def drawn_weights(
    la: Posterior, n_samples: int, generator: torch.Generator | None
) -> Iterator[Values]:
    """Draw the weights several times, as many draws at once as memory allows."""
    at_once = max(1, _NUMBERS // la.n_params)
    for start in range(0, n_samples, at_once):
        drawn = la.sample(min(at_once, n_samples - start), generator)
        yield from values_of(la.blocks, drawn)


def logits_with(la: Posterior, values: Values, x: Any) -> Tensor:
    """Compute a batch's logits `(B, C)` with other weights."""
    with la.model.forward_passes(), replace_weights(la.blocks, values):
        return la.model(x)


# --- drawn functions ------------------------------------------------------------------


class _Drawn(NamedTuple):
    """Logits of a few examples: the model's `(B, C)`, and draws' `(B, S, C)`."""

    f_mu: Tensor
    of_draws: Tensor


@exclusive
def drawn_functions(la: Posterior, weights: Tensor, pred_type: str, x: Any) -> Tensor:
    """Return scaled logits `(S, B, C)` with drawn weights `(S, parameters)`.

    By "nn" they are the network's own, by one forward pass each. By "glm" they are s
    (f(θ*) + J (θ - θ*)), with `logit_scale` s, by one set of Jacobians: over many
    draws, mean and covariance are those of `predictive_moments`, scaled by s, also
    between examples and between batches.
    """
    la.check_model()
    if pred_type == "nn":
        of_draws = values_of(la.blocks, weights)
        logits = [logits_with(la, values, x) for values in of_draws]
        return la.logit_scale * torch.stack(logits)
    # J (θ - θ*) adds up over blocks, whose Jacobians come one after the other.
    sizes = [block.n_params for block in la.blocks]
    changes = (weights - la.mean).split(sizes, dim=1)

    def of_part(part: Any, _: slice) -> _Drawn:
        products: list[Tensor] = []

        def multiply(indices: list[int], jacobians: Tensor) -> None:
            block = la.blocks[indices[0]]
            change = torch.stack([changes[index] for index in indices])
            change = block.small_side_first(change.unflatten(2, block.shape))
            product = torch.einsum("lbcrd,lsrd->bsc", jacobians, change.to(jacobians))
            products.append(product.to(weights.device))

        f_mu = la.recorder.visit_jacobians(part, multiply)
        return _Drawn(f_mu, f_mu[:, None] + torch.stack(products).sum(0))

    parts = la.recorder.predict(x, la.n_outputs, of_part)
    of_draws = torch.cat([part.of_draws for part in parts])
    return la.logit_scale * of_draws.transpose(0, 1)
