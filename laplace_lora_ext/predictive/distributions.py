"""Predictives: Gaussian logits by linearisation, and networks with drawn weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from laplace_lora_ext.likelihoods import Likelihood
from laplace_lora_ext.messages import check_counts
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.running import exclusive
from laplace_lora_ext.models.weights import Block, Values, called_with, check_in_place
from laplace_lora_ext.passes.recorder import Directions, every_output
from laplace_lora_ext.predictive.contrasts import Contrasts
from laplace_lora_ext.predictive.links import OF_DIFFERENCES, shared_noise
from laplace_lora_ext.predictive.moments import (
    AnyMoments,
    DifferenceMoments,
    Moments,
    gaussian_samples,
    uncorrelated,
)

# Of drawn weights that are in memory at once: 64 MB in float32, or one draw.
_NUMBERS = 2**24


class Drawable(Protocol):
    """A Gaussian around a model's weights, to draw these from."""

    blocks: list[Block]
    enable_backprop: bool
    trained_likelihood: Likelihood

    @property
    def model(self) -> LogitsModel: ...

    @property
    def logit_scale(self) -> float: ...

    def check_model(self) -> None: ...

    def sample(
        self, n_samples: int = 100, generator: torch.Generator | None = None
    ) -> Tensor: ...


class Linearised(Protocol):
    """A posterior whose linearised model makes Gaussian logits."""

    blocks: list[Block]
    enable_backprop: bool
    predicted_likelihood: Likelihood
    n_outputs: int
    n_contrasts: int | None

    @property
    def model(self) -> LogitsModel: ...

    @property
    def logit_scale(self) -> float: ...

    @property
    def has_variance(self) -> bool: ...

    def check_model(self) -> None: ...

    def moments(
        self, X: Any, joint: bool, directions: Directions = ...
    ) -> tuple[Tensor, Tensor]: ...


@exclusive
def predictive_moments(
    la: Linearised, x: Any, *, joint: bool = False
) -> Moments | tuple[Tensor, Tensor]:
    """Compute mean `(B, C)` and covariance `(B, C, C)` of a batch's logits.

    Neither link, noise nor `logit_scale` is in them. With `joint` a pair of tensors,
    `(B * C,)` and `(B * C, B * C)`.
    """
    f_mu, f_var = _of_all_logits(la, x, joint)
    if joint:
        return f_mu.flatten(), f_var
    return Moments(f_mu, f_var)


def predictive_distribution(
    la: Linearised,
    X: Any,
    joint: bool = False,
    diagonal_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """Predict mean and covariance, or variances, of scaled logits, as the host asks.

    `X` is a batch, or `Moments` of one.
    """
    of_model = Moments(*_of_all_logits(la, X, joint))
    f_mu, f_var = of_model.scaled(la.logit_scale)
    if joint:
        f_mu = f_mu.flatten()
    elif diagonal_output:
        f_var = f_var.diagonal(dim1=-2, dim2=-1)
    return f_mu, f_var


def moments_for(la: Linearised, X: Any, link_approx: str) -> AnyMoments:
    """Predict moments of scaled logits as a link needs them; see `moments_of_model`."""
    of_model = moments_of_model(la, X, link_approx)
    return of_model.scaled(la.logit_scale)


def of_classes(likelihood: Likelihood, moments: AnyMoments) -> AnyMoments:
    """Turn a model's moments into those of classes' logits, as links take them."""
    if isinstance(moments, DifferenceMoments):
        return moments  # of a softmax, whose outputs they are
    f_mu, f_var = moments
    return Moments(likelihood.class_logits(f_mu), likelihood.class_covariance(f_var))


def moments_of_model(la: Linearised, X: Any, link_approx: str) -> AnyMoments:
    """Compute a batch's moments for a link, by as few passes as it needs.

    Given `Moments` serve every link, unless they are those of differences. Links that
    only see differences of logits get those from the most probable logit, by a pass for
    each of `Contrasts`. All other links get all logits, by C passes. The logits are the
    model's, which `logit_scale` has not multiplied. Labels become two classes each:
    `(B, K, 2)` and `(B, K, 2, 2)`.
    """
    if not sees_differences(la, link_approx):
        of_all = Moments(*_of_all_logits(la, X))
        return of_classes(la.predicted_likelihood, of_all)
    if isinstance(X, AnyMoments):
        return _given(la, X)
    contrasts = Contrasts(la.n_contrasts)
    f_mu, covariance = _moments(la, X, directions=contrasts.directions)
    classes = contrasts.classes(f_mu.detach())
    return DifferenceMoments(f_mu, covariance, classes)


def sees_differences(la: Linearised, link_approx: str) -> bool:
    """Tell whether a link depends on differences of outputs alone."""
    is_softmax = la.predicted_likelihood.sees_differences and la.n_outputs > 1
    return is_softmax and link_approx in OF_DIFFERENCES


def _of_all_logits(
    la: Linearised, X: Any, joint: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute moments of a batch's logits; refuse those of differences."""
    if isinstance(X, DifferenceMoments):
        raise ValueError(
            "These moments tell of differences of logits alone, which the links "
            '"mean_field" and "mc" read. For all else pass the batch, or moments of '
            'predictive_statistics(..., link_approx="probit").'
        )
    return _moments(la, X, joint)


def _moments(
    la: Linearised,
    X: Any,
    joint: bool = False,
    directions: Directions = every_output,
) -> tuple[Tensor, Tensor]:
    """Compute moments of a batch's logits, or of combinations; `Moments` pass."""
    if not isinstance(X, Moments):
        la.check_model()
        if not la.has_variance:
            return _without_variance(la, X, joint, directions)
        with torch.set_grad_enabled(la.enable_backprop):
            return la.moments(X, joint, directions)
    if joint:
        raise ValueError(
            "Moments hold no covariance between examples: pass the inputs."
        )
    f_mu, f_var = _given(la, X)
    return f_mu, f_var


def _without_variance(
    la: Linearised, X: Any, joint: bool, directions: Directions
) -> tuple[Tensor, Tensor]:
    """Compute a batch's logits, and zeros in the shape of their covariance."""
    with la.model.forward_passes(la.enable_backprop):
        f_mu = la.model(X)
    n_examples = len(f_mu)
    n_directions = len(directions(f_mu.detach()))
    if joint:
        n = n_examples * n_directions
        return f_mu, f_mu.new_zeros(n, n)
    return f_mu, f_mu.new_zeros(n_examples, n_directions, n_directions)


def _given(la: Linearised, moments: AnyMoments) -> AnyMoments:
    """Bring given moments to the model's device."""
    dtype = la.blocks[0].statistics_dtype
    # A copy, since some links change them in place.
    return moments.to(la.model.device, dtype, copy=True)


@exclusive
def functional_samples(
    la: Linearised,
    f_mu: Tensor,
    f_var: Tensor,
    n_samples: int,
    diagonal_output: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw logits `(S, B, C)` from Gaussians."""
    if diagonal_output:
        f_var = uncorrelated(f_var)
    noise = shared_noise(f_mu, n_samples, generator)
    with torch.autocast(f_mu.device.type, enabled=False):
        # Unlike the host's Cholesky factor, a symmetric root of a singular covariance
        # exists.
        return gaussian_samples(f_mu, f_var, noise)


def as_values(
    blocks: Sequence[Block],
    drawn: Tensor,
) -> Values:
    """Cut drawn weights `(parameters,)` into values that a model can be called with."""
    check_in_place(blocks, "A draw of the weights")
    parts = drawn.split([block.n_params for block in blocks])
    values: Values = []
    for part, block in zip(parts, blocks, strict=True):
        matrix = part.reshape(block.shape)
        values.append(matrix.to(block.weight))
    return values


def network_samples(
    la: Drawable,
    X: Any,
    n_samples: int = 100,
    generator: torch.Generator | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """Compute scaled logits `(S, B, C)` under draws of the weights."""
    if isinstance(X, AnyMoments):
        raise ValueError('Moments hold no inputs: pass a batch for pred_type="nn".')
    check_counts(n_samples=n_samples)
    samples: list[Tensor] = []
    with la.model.forward_passes(la.enable_backprop):
        la.check_model()
        for values in drawn_weights(la, n_samples, generator):
            logits = called_with(la.model, la.blocks, values, X, **model_kwargs)
            samples.append(la.logit_scale * logits)
    return torch.stack(samples)


def drawn_weights(
    la: Drawable, n_samples: int, generator: torch.Generator | None
) -> Iterator[Values]:
    """Draw the LoRA weights several times, as many draws at once as memory allows."""
    n_params = sum(block.n_params for block in la.blocks)
    at_once = max(1, _NUMBERS // n_params)
    for start in range(0, n_samples, at_once):
        for drawn in la.sample(min(at_once, n_samples - start), generator):
            yield as_values(la.blocks, drawn)


def mean_probabilities(
    la: Drawable,
    X: Any,
    n_samples: int = 100,
    generator: torch.Generator | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """Average probabilities `(B, C)` or `(B, K, 2)` over draws of the weights."""
    samples = network_samples(la, X, n_samples, generator, **model_kwargs)
    return la.trained_likelihood.class_logits(samples).softmax(-1).mean(0)
