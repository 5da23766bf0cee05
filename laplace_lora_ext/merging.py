"""Adapters of one base model that are merged into one, by their posteriors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, cg
from torch import Tensor

from laplace_lora_ext.lora_laplace import LoRALaplace
from laplace_lora_ext.models.adapters import (
    add_copy,
    find_peft_model,
    own_adapter_back,
    own_weights,
)
from laplace_lora_ext.models.running import cpu_as_default, normal_tensors
from laplace_lora_ext.models.weights import check_in_place, parameters_with, values_of

_MOST_STEPS = 1000  # far more than any merge of ours has taken


@normal_tensors
def merge(posteriors: Sequence[LoRALaplace], adapter_name: str = "merged") -> str:
    """Write the mode of a product of posteriors as an adapter of the first one's model.

    Each weight goes where the posteriors are surest (Matena & Raffel, "Merging models
    with Fisher-weighted averaging", NeurIPS 2022, whose precisions are diagonal). A
    posterior's prior precision is part of its precision, and pulls the weights towards
    the mean of all adapters: try several, from 0.01 on, by held-out texts.

    Train the adapters from the same first weights (copies of one untrained adapter):
    only then does a weight of one stand for the same as in another. A head that is
    trained too is merged as well, if the posteriors have `modules_to_save=True`.

    Parameters
    ----------
    posteriors : sequence of LoRALaplace
        of one structure, fitted around adapters of one base model; these may be in one
        `PeftModel`, or each in its own
    adapter_name : str, default="merged"
        of the new adapter, an ordinary one: `model.set_adapter(name)`. The active
        adapter stays as it is

    Returns
    -------
    str
        `adapter_name`

    Raises
    ------
    ValueError
        If posteriors differ in layers, ranks, base model, or weights that none of them
        is over, or the model has an adapter of that name.
    AttributeError
        If one has no fit.
    RuntimeError
        If the model of one has changed since its fit, or the weights don't converge.
    NotImplementedError
        If weights are sharded or offloaded.
    """
    first = posteriors[0]
    for number, la in enumerate(posteriors):
        la.check_model()
        differing = first._fitted.model.difference(la._fitted.model)
        if differing is not None:
            raise ValueError(
                f"Posterior {number} has another model than the first: {differing}. "
                "Merge adapters of one base model and configuration; if it belongs "
                "to a head, fit all with modules_to_save=True."
            )
    check_in_place(first.blocks, "A merged adapter")
    (values,) = values_of(first.blocks, mode_of_product(posteriors)[None])
    merged = parameters_with(first.blocks, values)
    model = find_peft_model(first.model)
    adapter = first.blocks[0].adapter
    # The untrained values that PEFT draws for a new adapter are written over.
    with cpu_as_default(), torch.random.fork_rng(), own_adapter_back(model):
        add_copy(model, adapter, adapter_name)
        copies = own_weights(model, adapter_name)
        for name, weight in own_weights(model, adapter).items():
            if id(weight) in merged:
                copies[name].data.copy_(merged[id(weight)])
    return adapter_name


def mode_of_product(posteriors: Sequence[LoRALaplace]) -> Tensor:
    """Return the mode `(Σ P_i)⁻¹ Σ P_i μ_i` of a product, `(parameters,)` in float64.

    P are the precisions of posteriors over the same weights, and μ their means.
    """
    precisions = [la.posterior_precision for la in posteriors]
    means = torch.stack([la.mean.double().cpu() for la in posteriors])
    if isinstance(precisions[0], Tensor):
        of_each = torch.stack([P.to(means) for P in precisions])
        total = of_each.sum(0)
        if total.ndim == 1:
            return (of_each * means).sum(0) / total
        return torch.linalg.solve(total, (of_each @ means[..., None]).sum(0)[:, 0])

    # A sum of Kronecker products has no inverse of that kind, but multiplies fast. The
    # sum of the inverses is near to the inverse of the sum, and as cheap.
    products = [_times(P, mean) for P, mean in zip(precisions, means, strict=True)]
    weights, n_left = cg(
        _sum_of_powers(precisions, 1, means.shape[1]),
        torch.stack(products).sum(0).numpy(),
        x0=means.mean(0).numpy(),
        rtol=torch.finfo(posteriors[0].mean.dtype).eps ** 0.75,
        maxiter=_MOST_STEPS,
        M=_sum_of_powers(precisions, -1, means.shape[1]),
    )
    if n_left:
        raise RuntimeError(
            f"Merged weights have not converged after {_MOST_STEPS} steps: choose a "
            "larger prior_precision for the posteriors."
        )
    return torch.from_numpy(weights)


def _sum_of_powers(
    precisions: Sequence[Any], exponent: int, size: int
) -> LinearOperator:
    """Make what multiplies vectors `(parameters,)` by a sum of powers of precisions."""

    def multiply(x: np.ndarray) -> np.ndarray:
        vector = torch.from_numpy(x)
        products = [_times(P, vector, exponent) for P in precisions]
        return torch.stack(products).sum(0).numpy()

    shape = size, size
    return LinearOperator(shape, multiply, dtype=np.float64)  # pyright: ignore[reportCallIssue]


def _times(precision: Any, vector: Tensor, exponent: int = 1) -> Tensor:
    """Multiply a vector `(parameters,)` by a power of a precision, on the CPU."""
    # Given a vector, the host's `bmm` returns a vector.
    return precision.bmm(vector.to(precision.deltas), exponent=exponent).to(vector)
