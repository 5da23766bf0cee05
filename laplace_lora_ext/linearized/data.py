"""One pass over a training set, which makes a linearised model of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import tqdm

from laplace_lora_ext.likelihoods import Likelihood
from laplace_lora_ext.linearized.model import LinearizedModel
from laplace_lora_ext.linearized.sketch import Sketch
from laplace_lora_ext.messages import naming
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import Block
from laplace_lora_ext.passes import visit_jacobians


def linearize(
    model: LogitsModel,
    blocks: Sequence[Block],
    likelihood: Likelihood,
    distance: torch.Tensor,
    loader: Iterable[Any],
    n_features: int,
    generator: torch.Generator | None,
    progress_bar: bool,
) -> LinearizedModel:
    """Random features of the Jacobians at the trained weights, and the logits there.

    `distance`, `(parameters,)`, is that of the trained weights from the prior mean; the other
    arguments, and what is raised, are those of `LoRALaplace.linearize`.
    """
    if n_features < 1:
        raise ValueError(f"n_features must be at least 1, not {n_features}.")
    parts = distance.split([block.weight.numel() for block in blocks])
    distances = [
        block.small_side_first(part.reshape(block.weight.shape))
        for block, part in zip(blocks, parts, strict=True)
    ]
    shapes = [(len(part), part.shape[1]) for part in distances]
    sketch = Sketch(shapes, n_features, distance.device, distance.dtype, generator)
    results = []
    batches = tqdm.tqdm(loader, desc="[Linearizing]", disable=not progress_bar)
    for index, batch in enumerate(batches):
        with naming(f"batch {index}"):
            X, y = model.split(batch)
            f_mu, features, moved = _features(model, blocks, X, sketch, distances)
            y = likelihood.check_targets(y, f_mu)
            results.append((f_mu.to(moved).cpu(), features, moved.cpu(), y.cpu()))
    if not results:
        raise ValueError("The training loader has no data.")
    f_mu, features, moved, targets = (torch.cat(part) for part in zip(*results, strict=True))
    return LinearizedModel(
        f_mu, features, sketch.feature_block, f_mu - moved, targets, likelihood.name
    )


def _features(
    model: LogitsModel,
    blocks: Sequence[Block],
    X: Any,
    sketch: Sketch,
    distances: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits `(B, C)`, features `(B, C, F)`, and what the weights' distance adds, `(B, C)`."""
    features = [torch.empty(0)] * len(blocks)
    moved = torch.zeros((), device=distances[0].device, dtype=distances[0].dtype)

    def visit(index: int, jacobian: torch.Tensor) -> None:
        nonlocal moved
        jacobian = jacobian.to(moved)
        moved = moved + (jacobian * distances[index]).sum((-2, -1))
        features[index] = sketch(index, jacobian).cpu()

    f_mu = visit_jacobians(model, blocks, X, visit)
    return f_mu, torch.cat(features, dim=2), moved
