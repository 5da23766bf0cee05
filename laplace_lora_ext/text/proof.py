"""Finds out on a batch which way to compute a product Jδ is right for a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from laplace_lora_ext.models.weights import Values
from laplace_lora_ext.text.perturbations import (
    CentralDifference,
    ForwardMode,
    Perturbation,
    drawn_logits,
)

Run = Callable[[Values], torch.Tensor]
"""Takes LoRA weights, and returns a batch's logits with them."""

STEPS = (0.1, 0.03, 0.01, 0.003, 0.001)  # relative to the norm of the LoRA weights
AGREEMENT = 5e-3  # relative difference up to which two ways agree
_WORST = 0.1  # relative error to tolerate if two ways differ: bfloat16 has up to 0.08


def proven(run: Run, values: Values, direction: Values) -> Perturbation:
    """The cheapest way to multiply with a Jacobian that a batch proves right.

    Central differences work with any kernel in two passes, but drown in rounding if the base is in
    half precision. Forward-mode derivatives take longer, and some kernels have none, or wrong ones.
    If both agree, take differences. If not, a backward pass decides, as everything else in this
    library relies on those: along the difference D of the two products it gives
    `⟨D, Jδ⟩ = ⟨JᵀD, δ⟩`, which the right way must match.

    Parameters
    ----------
    run : callable
    values, direction : list of torch.Tensor
        the trained weights, and a typical draw

    Raises
    ------
    RuntimeError
        If neither way is right.
    """
    with torch.no_grad():
        f = run(values)
        step, differences, spread = _best_step(run, values, direction, f)
        forward = _forward(run, values, direction, f)
    if forward is None:
        if spread < AGREEMENT:
            return CentralDifference(step)
        raise RuntimeError(
            "Can't compute products with the Jacobian: finite differences with two steps differ by "
            f"{spread:.2g}, and the model has no forward-mode derivatives. Load the model in "
            'float32, or with attn_implementation="eager".'
        )
    apart = forward - differences
    if apart.norm() < AGREEMENT * forward.norm():
        return CentralDifference(step)
    expected = _along(apart, run, values, direction)
    errors = {
        way: abs((product * apart).sum().item() - expected) / (product.norm() * apart.norm()).item()
        for way, product in (
            (CentralDifference(step), differences),
            (ForwardMode(), forward),
        )
    }
    best = min(errors, key=lambda way: errors[way])
    if errors[best] > _WORST:
        raise RuntimeError(
            "Neither differences nor forward-mode derivatives agree with the model's gradients "
            f"(relative errors {', '.join(f'{error:.2g}' for error in errors.values())}). Load the "
            "model in float32, or with another attn_implementation."
        )
    return best


def _best_step(
    run: Run, values: Values, direction: Values, f: torch.Tensor
) -> tuple[float, torch.Tensor, float]:
    """The step whose product changes least from the previous step's, the product, the change."""
    best: tuple[float, torch.Tensor, float] | None = None
    before: torch.Tensor | None = None
    for step in STEPS:
        product = _product(CentralDifference(step), run, values, direction, f)
        if before is not None:
            change = ((product - before).norm() / product.norm()).item()
            if best is None or change < best[2]:
                best = step, product, change
        before = product
    assert best is not None
    return best


def _forward(run: Run, values: Values, direction: Values, f: torch.Tensor) -> torch.Tensor | None:
    try:
        product = _product(ForwardMode(), run, values, direction, f)
    except (RuntimeError, NotImplementedError):
        return None
    return product if torch.isfinite(product).all() else None


def _product(
    way: Perturbation, run: Run, values: Values, direction: Values, f: torch.Tensor
) -> torch.Tensor:
    (product,) = drawn_logits(way, values, [direction], partial(map, run), torch.zeros_like(f))
    return product


def _along(seed: torch.Tensor, run: Run, values: Values, direction: Values) -> float:
    """`⟨D, Jδ⟩` by one backward pass."""
    leaves = [value.detach().requires_grad_() for value in values]
    with torch.enable_grad():
        gradients = torch.autograd.grad(run(leaves), leaves, seed, allow_unused=True)
    products = (
        (g.double() * d).sum().item()
        for g, d in zip(gradients, direction, strict=True)
        if g is not None
    )
    return sum(products)
