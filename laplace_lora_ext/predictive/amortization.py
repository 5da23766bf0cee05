"""Learns the variances of a posterior's logits, to predict by one forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from laplace_lora_ext.models.batches import Swapping, named_batches
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.running import exclusive
from laplace_lora_ext.models.weights import are_in_place
from laplace_lora_ext.predictive.amortized import LearntVariance, log_variances
from laplace_lora_ext.predictive.data_sets import Columns, over_loader
from laplace_lora_ext.predictive.posterior import Posterior, features_of, logits_with
from laplace_lora_ext.processes.exchange import together
from laplace_lora_ext.processes.shards import join_batches

_SWAPPED = "swapped"
# For each example, where there are too many outputs for a backward pass each.
_DRAWS = 8

# The logarithm of a variance that is estimated from k draws is off by digamma(k / 2) -
# log(k / 2) on average, and its variance is trigamma(k / 2) (Bartlett & Kendall, 1946).
_HALF_OF_DRAWS = torch.tensor(_DRAWS / 2, dtype=torch.float64)
_BIAS_OF_DRAWS = (torch.digamma(_HALF_OF_DRAWS) - _HALF_OF_DRAWS.log()).item()
_NOISE_OF_DRAWS = torch.polygamma(1, _HALF_OF_DRAWS).item()


@exclusive
@torch.inference_mode(False)
@torch.no_grad()
@together()
def amortize(
    la: Posterior,
    loader: DataLoader | Iterable[Any],
    unlabelled: str | DataLoader | Iterable[Any] | None = _SWAPPED,
    progress_bar: bool = False,
    generator: torch.Generator | None = None,
) -> LearntVariance:
    """Learn the variances of the logits, so that predictions take one forward pass.

    Parameters, result and errors are those of `LoRALaplace.amortize`.
    """
    if la.task.predicted is not la.task:
        raise ValueError(
            f"amortize is for classification and regression, not {la.likelihood}."
        )
    if isinstance(unlabelled, str) and unlabelled != _SWAPPED:
        raise ValueError(
            f'unlabelled must be "swapped", data or None, not {unlabelled!r}.'
        )
    la.check_model()
    generator = generator or torch.Generator()
    # Weights are drawn where the model is, by a generator of that place.
    draws = torch.Generator(la.model.device)
    draws.manual_seed(generator.initial_seed())
    swapped = None
    if unlabelled == _SWAPPED:
        swapped = _swapping(la, loader, generator)

    def versions(batch: Any) -> Columns:
        """Learn from K versions of each example: features and log-variances."""
        pairs = [_learnt_from(la, batch, draws)]
        text = la.model.text(batch)
        if swapped is not None and text is not None:
            pairs.append(_learnt_from(la, swapped(text), draws))
        return tuple(torch.stack(each, dim=1) for each in zip(*pairs, strict=True))

    data = {"[Variances]": loader}
    if unlabelled is not None and not isinstance(unlabelled, str):
        data["[Variances, unlabelled]"] = unlabelled
    passes = [
        over_loader(each, versions, title, progress_bar, owners=la.model.owners)
        for title, each in data.items()
    ]
    features, logs = join_batches(passes)
    learnt = LearntVariance.of(
        features.flatten(0, 1),
        logs.flatten(0, 1),
        prior_precision=la.prior_precision,
        curvature_scale=la._H_factor,
        noise=_NOISE_OF_DRAWS if _draws(la) else 0.0,
    )
    la.learnt_variance = learnt.to(la.model.device, la.blocks[0].statistics_dtype)
    return la.learnt_variance


def _swapping(
    la: Posterior, loader: Iterable[Any], generator: torch.Generator
) -> Swapping | None:
    """Read a loader for tokens to swap; None where it holds no texts."""
    texts = [la.model.text(batch) for _, batch in named_batches(loader)]
    texts = [text for text in texts if text is not None]
    return Swapping(texts, la.model.transformer, generator) if texts else None


def _learnt_from(
    la: Posterior, batch: Any, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Compute features `(B, p)` and logarithms of variances `(B, P)`, on the CPU.

    They are exact, or from draws and right on average.
    """
    inputs = la.model.inputs(batch)
    with la.model.running():
        _, features = features_of(la, inputs)
    if _draws(la):
        changes = changes_of_logits(la, inputs, la.sample(_DRAWS, generator))
        f_var = torch.einsum("sbj,sbk->bjk", changes, changes) / _DRAWS
        logs = log_variances(f_var) - _BIAS_OF_DRAWS
    else:
        _, f_var = la.predictive_moments(inputs)
        logs = log_variances(f_var.detach())
    return features.cpu(), logs.cpu()


def _draws(la: Posterior) -> bool:
    """Tell whether to learn from draws of the weights, rather than exact variances.

    They take two forward passes a draw, where exact ones take a backward pass an
    output, and need weights that can be replaced.
    """
    return la.n_outputs > 2 * _DRAWS and are_in_place(la.blocks)


def changes_of_logits(la: Posterior, inputs: Any, drawn: Tensor) -> Tensor:
    """Compute how drawn weights `(S, parameters)` change the linearised model's logits.

    They are J (θ - θ*), `(S, B, C)`: central differences, by two forward passes a draw.
    The step is the one that rounding and curvature leave the smallest error with, the
    cube root of the precision of the model's numbers.
    """
    step = _precision(la.model) ** (1 / 3)
    logits_at = partial(logits_with, la, x=inputs)
    changes: list[Tensor] = []
    for each in drawn:
        change = step * (each - la.mean)
        difference = logits_at(la.mean + change) - logits_at(la.mean - change)
        changes.append(difference / (2 * step))
    return torch.stack(changes)


def _precision(model: LogitsModel) -> float:
    """Find the precision of the coarsest numbers that a model computes with."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if torch.is_autocast_enabled(model.device.type):
        dtypes.add(torch.get_autocast_dtype(model.device.type))
    precisions: list[float] = []
    for dtype in dtypes:
        is_quantised = not dtype.is_floating_point or dtype.itemsize == 1
        precisions.append(torch.finfo(torch.bfloat16 if is_quantised else dtype).eps)
    return max(precisions)
