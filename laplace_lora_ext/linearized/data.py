"""One pass over a training set, which makes a linearised model of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from laplace_lora_ext.likelihoods import Likelihood
from laplace_lora_ext.linearized.basis import Basis
from laplace_lora_ext.linearized.model import LinearizedModel
from laplace_lora_ext.linearized.storage import Collected
from laplace_lora_ext.messages import naming
from laplace_lora_ext.models.batches import named_batches
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import Block
from laplace_lora_ext.models.weights import flattened
from laplace_lora_ext.passes import visit_jacobians
from laplace_lora_ext.passes.parts import in_parts
from laplace_lora_ext.processes.exchange import count
from laplace_lora_ext.processes.shards import Shard, is_new, joined


class _Part(NamedTuple):
    """Of some examples: logits, what the distance adds, labels, features and own products."""

    f_mu: torch.Tensor
    moved: torch.Tensor
    labels: torch.Tensor
    features: torch.Tensor
    own: torch.Tensor


def linearize(
    model: LogitsModel,
    blocks: Sequence[Block],
    likelihood: Likelihood,
    prior_mean: float | torch.Tensor,
    loader: Iterable[Any],
    basis: Basis,
    progress_bar: bool,
) -> LinearizedModel:
    """Features of the Jacobians at the trained weights, and the logits there.

    `prior_mean` and the other arguments, and what is raised, are those of `LoRALaplace.linearize`
    and of its posterior.
    """
    distance = flattened(blocks, model.device) - prior_mean
    parts = distance.split([block.weight.numel() for block in blocks])
    distances = [
        block.small_side_first(part.reshape(block.shape)).to(block.device)
        for block, part in zip(blocks, parts, strict=True)
    ]
    collected, results = (Collected(), Collected()), []
    places, shard = [torch.empty(0, dtype=torch.long)], Shard(loader)
    for name, batch in named_batches(loader, "[Linearizing]", progress_bar):
        with naming(name):
            X, y = model.split(batch)
            places.append(shard.places(len(y)))

            def evaluate(part: Any, place: slice, y: torch.Tensor = y) -> _Part:
                f_mu, features, own, moved = _features(model, blocks, part, basis, distances)
                labels = likelihood.check_targets(y[place], f_mu)
                return _Part(f_mu.to(moved).cpu(), moved.cpu(), labels.cpu(), features, own)

            for found in in_parts(model, X, model.output_size, evaluate, len(y)):
                collected[0].append(found.features)
                collected[1].append(found.own)
                results.append(found[:3])
    f_mu, moved, y, features, own = _of_all_ranks(torch.cat(places), collected, results)
    fitted = f_mu, features, basis.feature_block, f_mu - moved, y
    return LinearizedModel(*fitted, likelihood.name, own, prior_mean)


def _of_all_ranks(
    places: torch.Tensor,
    collected: Iterable[Collected],
    results: Sequence[tuple[torch.Tensor, ...]],
) -> tuple[Any, ...]:
    """Results, and what was collected, in the data's order."""
    columns: tuple[Any, ...] | None = None
    if results:
        kept = [each.result() for each in collected]
        if count() > 1 or not is_new(places).all():  # what is sent or sorted has to be in memory
            kept = [each[:] for each in kept]
        columns = *(torch.cat(part) for part in zip(*results, strict=True)), *kept
    columns = joined(places, columns)
    if columns is None:
        raise ValueError("The training loader has no data.")
    return columns


def _features(
    model: LogitsModel,
    blocks: Sequence[Block],
    X: Any,
    basis: Basis,
    distances: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits `(B, C)`, features `(B, C, F)`, own products, and what the distance adds, `(B, C)`."""
    features = [torch.empty(0)] * len(blocks)
    own = [torch.empty(0)] * len(blocks)
    moved = torch.zeros((), device=model.device, dtype=distances[0].dtype)

    def visit(index: int, jacobian: torch.Tensor) -> None:
        nonlocal moved
        jacobian = jacobian.to(distances[index])
        moved = moved + (jacobian * distances[index]).sum((-2, -1)).to(moved)
        features[index], own[index] = basis(index, jacobian)

    f_mu = visit_jacobians(model, blocks, X, visit)
    # All blocks together: each copy from an accelerator waits for the work there.
    of_all = torch.cat([part.to(f_mu.device) for part in features], dim=2)
    own_of_all = torch.stack([part.to(f_mu.device) for part in own], dim=1)
    return f_mu, of_all.cpu(), own_of_all.cpu(), moved
