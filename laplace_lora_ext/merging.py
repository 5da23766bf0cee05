"""Adapters of one base model that are merged into one, by their posteriors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from laplace_lora_ext.fit import Fit
from laplace_lora_ext.lora_laplace import LoRALaplace
from laplace_lora_ext.messages import check_positive, warn
from laplace_lora_ext.models.adapters import (
    add_copy,
    find_peft_model,
    own_adapter_back,
)
from laplace_lora_ext.models.running import cpu_as_default
from laplace_lora_ext.models.same_model import ModelState
from laplace_lora_ext.models.weights import (
    check_in_place,
    flattened,
    parameters_with,
)
from laplace_lora_ext.tuning import build

PRIOR_PRECISIONS = (0.01, 0.1, 1.0, 10.0, 100.0)
"""What `merge` tries where held-out data choose."""

_MOST_ITERATIONS = 1000  # far more than any merge of ours has taken

# A vector `(parameters,)` times a matrix.
_Product = Callable[[Tensor], Tensor]


@torch.inference_mode(False)  # what is kept must not be inference tensors
def merge(
    posteriors: Sequence[LoRALaplace],
    adapter_name: str = "merged",
    *,
    weights: Sequence[float] | None = None,
    val_loader: DataLoader | Iterable[Any] | None = None,
    progress_bar: bool = False,
) -> LoRALaplace:
    """Merge trained adapters into one, each weight as far as posteriors are sure of it.

    The merged weights are the mode of the product of the posteriors, `(Σ w_i P_i)⁻¹ Σ
    w_i P_i μ_i` with their precisions P and means μ (Matena & Raffel, "Merging models
    with Fisher-weighted averaging", NeurIPS 2022, whose precisions are diagonal): where
    one adapter's data say much and another's nothing, the first decides. Conjugate
    gradients find it, without a pass of the model or any data.

    A posterior's prior precision counts in P, and pulls the weights towards the mean of
    all adapters, which is all that a large one leaves. Held-out data of all adapters
    choose one, from 0.01 to 100; without them the posteriors' own count.

    Train the adapters from the same first weights (copies of one untrained adapter):
    only then does a weight of one stand for the same as in another. Where a head is
    trained too, fit the posteriors with `modules_to_save=True`, so that it is merged as
    well.

    Parameters
    ----------
    posteriors : sequence of LoRALaplace
        two or more, fitted around adapters of one base model; these may be in one
        `PeftModel`, or each in its own
    adapter_name : str, default="merged"
        of the new adapter in the first posterior's model. It is an ordinary one:
        `model.set_adapter(name)`. The active adapter stays as it is
    weights : sequence of float, optional
        w, how much each posterior counts in the merged weights; all 1 by default
    val_loader : DataLoader or iterable, optional
        held-out data, read once for each prior precision in `PRIOR_PRECISIONS`, by the
        passes of a "gridsearch"
    progress_bar : bool, default=False
        of these passes

    Returns
    -------
    LoRALaplace
        a posterior around the merged adapter, with the options of the first. Its
        curvature is of all data, each as it was at the adapter that learnt them. Its
        own prior precision is what the held-out data have chosen for predictions;
        without them it is the weighted sum, and you choose another

    Raises
    ------
    ValueError
        If there are fewer than two posteriors, they differ in structure, likelihood,
        layers, ranks, settings or base model, or in weights that none of them is over,
        a weight is not positive, the model has an adapter of that name, or the
        held-out data can't be read again.
    AttributeError
        If one has no fit.
    RuntimeError
        If the model of one has changed since its fit.
    NotImplementedError
        If weights are sharded or offloaded.
    """
    shares = _shares(posteriors, weights)
    _check_alike(posteriors)
    first = posteriors[0]
    check_in_place(first.blocks, "A merged adapter")
    search = None
    if val_loader is not None:
        if iter(val_loader) is val_loader:
            raise ValueError(
                "Held-out data are read for each prior precision that is tried, and a "
                "generator can be read once: pass a list or a DataLoader."
            )
        search = build(
            "gridsearch",
            {"val_loader": val_loader, "progress_bar": progress_bar},
            first.problem.methods,
        )
    model = find_peft_model(first.model)
    # The untrained values that PEFT draws for a new adapter are written over.
    with cpu_as_default(), torch.random.fork_rng(), own_adapter_back(model):
        add_copy(model, first.blocks[0].adapter, adapter_name)
        merged = first.for_model(first.model.model)
        joint = _joint_fit(merged, posteriors)
        if search is None:
            _put(merged, joint, posteriors, shares)
            return merged

        def loss(candidates: Sequence[LoRALaplace]) -> float:
            _put(merged, joint, candidates, shares)
            return search.choose(merged).objective.min().item()

        best = min(_with_priors(posteriors), key=loss)
        _put(merged, joint, best, shares)
        search(merged)
        return merged


def mode_of_product(
    posteriors: Sequence[LoRALaplace],
    weights: Sequence[float] | None = None,
) -> Tensor:
    """Find the mode `(Σ w_i P_i)⁻¹ Σ w_i P_i μ_i` of a product of posteriors.

    Parameters
    ----------
    posteriors : sequence of LoRALaplace
        over the same weights
    weights : sequence of float, optional
        all 1 by default

    Returns
    -------
    torch.Tensor
        `(parameters,)`, in float64, where the first posterior is
    """
    shares = weights or [1.0] * len(posteriors)
    device = posteriors[0].mean.device
    means = [la.mean.to(device, torch.float64) for la in posteriors]
    precisions = [la.posterior_precision for la in posteriors]

    def times_sum(vector: Tensor) -> Tensor:
        total = torch.zeros_like(vector)
        for precision, share in zip(precisions, shares, strict=True):
            total += share * _times(precision, vector)
        return total

    def times_covariances(vector: Tensor) -> Tensor:
        # Near to the inverse of the sum, and as cheap: directions in which the one is
        # sure and the other not are what makes plain gradients slow.
        total = torch.zeros_like(vector)
        for precision in precisions:
            total += _times(precision, vector, exponent=-1)
        return total

    wanted = torch.zeros_like(means[0])
    for precision, share, mean in zip(precisions, shares, means, strict=True):
        wanted += share * _times(precision, mean)
    return conjugate_gradients(
        times_sum,
        wanted,
        start=torch.stack(means).mean(0),
        precondition=times_covariances,
        tolerance=torch.finfo(posteriors[0].mean.dtype).eps ** 0.75,
    )


def conjugate_gradients(
    times: _Product,
    wanted: Tensor,
    *,
    start: Tensor,
    precondition: _Product,
    tolerance: float,
) -> Tensor:
    """Solve `times(x) = wanted` for a positive definite matrix.

    A sum of Kronecker products has no inverse of that kind, but multiplies fast.

    Parameters
    ----------
    times : callable
        multiplies a vector `(parameters,)` by the matrix
    wanted : torch.Tensor
        `(parameters,)`
    start : torch.Tensor
        `(parameters,)`
    precondition : callable
        multiplies by a positive definite matrix that is near to the inverse
    tolerance : float
        how small the residual is to become, relative to the vector `wanted`; where it
        does not, there is a warning

    Returns
    -------
    torch.Tensor
        `(parameters,)`
    """

    def square(residual: Tensor) -> Tensor:
        return residual @ precondition(residual)

    x = start
    residual = wanted - times(x)
    preconditioned = precondition(residual)
    direction = preconditioned
    error = residual @ preconditioned
    enough = tolerance**2 * square(wanted)
    for _ in range(_MOST_ITERATIONS):
        if error <= enough:
            return x
        product = times(direction)
        step = error / (direction @ product)
        x = x + step * direction
        residual = residual - step * product
        preconditioned = precondition(residual)
        last_error = error
        error = residual @ preconditioned
        # Conjugate to all directions so far: no step undoes another.
        direction = preconditioned + error / last_error * direction
    warn(
        f"Merged weights have not converged after {_MOST_ITERATIONS} steps: choose a "
        "larger prior_precision for the posteriors."
    )
    return x


def _shares(
    posteriors: Sequence[LoRALaplace],
    weights: Sequence[float] | None,
) -> list[float]:
    """Return how much each posterior counts."""
    if len(posteriors) < 2:
        raise ValueError("Nothing to merge: pass two fitted posteriors or more.")
    if weights is None:
        return [1.0] * len(posteriors)
    shares = list(weights)
    if len(shares) != len(posteriors):
        raise ValueError(
            f"There are {len(shares)} weights for {len(posteriors)} posteriors: pass "
            "one for each."
        )
    check_positive("weights", torch.tensor(shares))
    return shares


def _check_alike(posteriors: Sequence[LoRALaplace]) -> None:
    """Refuse posteriors that are not over the same weights of one model."""
    for la in posteriors:
        la.check_model()
    first, *others = posteriors
    for number, other in enumerate(others, 1):
        name = f"Posterior {number}"
        first.check_joins(other, name)
        differing = first.model_state.differing(other.model_state)
        if differing is not None:
            raise ValueError(
                f"{name} differs from the first in what neither is over: {differing}. "
                "Fit all with modules_to_save=True if it belongs to a head, or else "
                "give all adapters the same."
            )


def _with_priors(
    posteriors: Sequence[LoRALaplace],
) -> Iterator[list[LoRALaplace]]:
    """Yield copies of posteriors with each prior precision that is tried."""
    for prior_precision in PRIOR_PRECISIONS:
        copies = [copy(la) for la in posteriors]
        for la in copies:
            la.prior_precision = prior_precision
        yield copies


def _put(
    merged: LoRALaplace,
    joint: Fit,
    posteriors: Sequence[LoRALaplace],
    shares: Sequence[float],
) -> None:
    """Write the mode of a product into an adapter, and put the joint fit around it."""
    _write(merged, mode_of_product(posteriors, shares))
    mean = flattened(merged.blocks, merged.model.device)
    loss = torch.zeros_like(joint.loss)
    for la in posteriors:
        loss += la.loss_at(mean).to(loss)
    # The curvature of all data is as it was, wherever the mode is.
    merged.take_over(replace(joint, mean=mean, loss=loss))
    merged.prior_precision = _prior_of_product(posteriors, shares)


def _times(precision: Any, vector: Tensor, exponent: int = 1) -> Tensor:
    """Multiply a vector `(parameters,)` by a power, 1 or -1, of a precision."""
    if not isinstance(precision, Tensor):
        # Of one vector the host makes one.
        product = precision.bmm(vector.to(precision.deltas), exponent=exponent)
    elif precision.ndim == 1:
        product = precision**exponent * vector.to(precision)
    else:
        power = torch.linalg.matrix_power(precision, exponent)
        product = power @ vector.to(precision)
    return product.to(vector)


def _prior_of_product(
    posteriors: Sequence[LoRALaplace],
    shares: Sequence[float],
) -> Tensor:
    """Compute the prior precision in `Σ w_i P_i`: one, or one a block or number."""
    priors = [la.prior_precision for la in posteriors]
    longest = max(len(prior) for prior in priors)
    total = torch.zeros_like(priors[0])
    for la, share in zip(posteriors, shares, strict=True):
        prior = la.prior_precision
        if len(prior) not in (1, longest):
            # Only "diag" has a prior precision for each number, beside one a block.
            prior = la.prior_precision_diag
        total = total + share * prior.to(total)
    return total


@torch.no_grad()
def _write(la: LoRALaplace, weights: Tensor) -> None:
    """Put weights `(parameters,)` into a posterior's adapter."""
    sizes = [block.n_params for block in la.blocks]
    parts = weights.split(sizes)
    matrices = [
        part.view(block.shape).to(block.weight)
        for block, part in zip(la.blocks, parts, strict=True)
    ]
    written = parameters_with(la.blocks, matrices)
    for block in la.blocks:
        block.weight.copy_(written[id(block.weight)])


def _joint_fit(merged: LoRALaplace, posteriors: Sequence[LoRALaplace]) -> Fit:
    """Join the curvature of posteriors; each loss is that at its own mean as yet."""
    structure = merged.structure
    first = posteriors[0].present_fit
    joint = Fit(
        mean=flattened(merged.blocks, merged.model.device),
        sums=structure.zeros(),
        curvature=None,
        loss=torch.zeros_like(first.loss),
        n_data=0,
        n_outputs=first.n_outputs,
        model=ModelState.of(merged.model, merged.blocks),
        places=merged.recorder.places,
    )
    for la in posteriors:
        joint = joint.after(la.present_fit, la.loss, structure)
    return joint
