"""Learns the variances of a posterior's logits, and predicts by one forward pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from laplace_lora_ext.models.answers import output_layer_of
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.running import exclusive, normal_tensors
from laplace_lora_ext.models.swapping import swapping
from laplace_lora_ext.models.weights import are_in_place, values_of
from laplace_lora_ext.predictive.data_sets import Columns, over_loader
from laplace_lora_ext.predictive.learnt_variance import LearntVariance, log_variances
from laplace_lora_ext.predictive.moments import Moments
from laplace_lora_ext.predictive.posterior import Posterior, logits_with, moments_for
from laplace_lora_ext.processes import together
from laplace_lora_ext.processes.shards import join_batches

# How many calls of layers are searched for the logits: the last ones, so that few
# activations are kept in memory.
_LAST = 8

# For each example, where there are too many outputs for a backward pass each.
_DRAWS = 8

# The logarithm of a variance that is estimated from k draws is off by digamma(k / 2) -
# log(k / 2) on average, and its variance is trigamma(k / 2) (Bartlett & Kendall, 1946).
_HALF_OF_DRAWS = torch.tensor(_DRAWS / 2, dtype=torch.float64)
_BIAS_OF_DRAWS = (torch.digamma(_HALF_OF_DRAWS) - _HALF_OF_DRAWS.log()).item()
_NOISE_OF_DRAWS = torch.polygamma(1, _HALF_OF_DRAWS).item()


# --- learning -------------------------------------------------------------------------


@exclusive
@normal_tensors
@torch.no_grad()
@together()
def amortize(
    la: Posterior,
    loader: Iterable[Any],
    unlabelled: str | Iterable[Any] | None,
    progress_bar: bool,
    generator: torch.Generator | None,
) -> LearntVariance:
    """Learn the variances of the logits, so that predictions take one forward pass.

    Parameters, result and errors are those of `LoRALaplace.amortize`.
    """
    if la.task.predicted is not la.task:
        raise ValueError(
            f"amortize is for classification and regression, not {la.likelihood}."
        )
    la.check_model()
    generator = generator or torch.Generator()
    # Weights are drawn where the model is, by a generator of that place.
    draws = torch.Generator(la.model.device)
    draws.manual_seed(generator.initial_seed())
    data = {"[Variances]": loader}
    swapped = None
    if isinstance(unlabelled, str):
        swapped = swapping(la.model, unlabelled, loader, generator)
    elif unlabelled is not None:
        data["[Variances, unlabelled]"] = unlabelled

    def versions(batch: Any) -> Columns:
        """Learn from K versions of each example: features and log-variances."""
        pairs = [_learnt_from(la, batch, draws)]
        copy = None if swapped is None else swapped(batch)
        if copy is not None:
            pairs.append(_learnt_from(la, copy, draws))
        return tuple(torch.stack(each, dim=1) for each in zip(*pairs, strict=True))

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


def _learnt_from(
    la: Posterior, batch: Any, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Compute features `(B, p)` and logarithms of variances `(B, P)`, on the CPU.

    They are exact, or from draws and right on average.
    """
    inputs = la.model.inputs(batch)
    with la.model.running(), noting_dtypes(la) as dtypes:
        _, features = features_of(la, inputs)
    if _draws(la):
        changes = changes_of_logits(la, inputs, la.sample(_DRAWS, generator), dtypes)
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


def changes_of_logits(
    la: Posterior, inputs: Any, drawn: Tensor, dtypes: Iterable[torch.dtype]
) -> Tensor:
    """Compute how drawn weights `(S, parameters)` change the linearised model's logits.

    They are J (θ - θ*), `(S, B, C)`: central differences, by two forward passes a draw.
    The step is the one that rounding and curvature leave the smallest error with, the
    cube root of the precision of the model's numbers, which are of some `dtypes`.
    """
    step = _coarsest(dtypes) ** (1 / 3)
    changes: list[Tensor] = []
    for each in drawn:
        change = step * (each - la.mean)
        ends = torch.stack([la.mean + change, la.mean - change])
        after, before = (
            logits_with(la, values, inputs) for values in values_of(la.blocks, ends)
        )
        changes.append((after - before) / (2 * step))
    return torch.stack(changes)


@contextmanager
def noting_dtypes(la: Posterior) -> Iterator[set[torch.dtype]]:
    """Collect the dtypes of a model's weights, and of what LoRA returns within.

    A trainer of mixed precision leaves its autocast on within the model.
    """
    dtypes = {weight.dtype for weight in la.model.parameters()}

    def note(*call: Any) -> None:
        dtypes.add(call[-1].dtype)

    with ExitStack() as hooks:
        for block in la.blocks:
            hooks.callback(block.module.register_forward_hook(note).remove)
        yield dtypes


def _coarsest(dtypes: Iterable[torch.dtype]) -> float:
    """Find the precision of the coarsest numbers that a model computes with."""
    # What is quantised is computed in half precision.
    computed = {
        dtype if dtype.is_floating_point and dtype.itemsize > 1 else torch.bfloat16
        for dtype in dtypes
    }
    return max(torch.finfo(dtype).eps for dtype in computed)


# --- predictions ----------------------------------------------------------------------


def learnt_moments(la: Posterior, x: Any, link_approx: str) -> Moments:
    """Return what `moments_for` does, with learnt variances."""
    moments = amortized_moments(la, x)
    if la.task.predicted.has_noise:  # whose density needs a covariance
        moments = moments.semidefinite()
    return moments_for(la, moments, link_approx)


def amortized_moments(la: Posterior, x: Any) -> Moments:
    """Predict mean and learnt covariance of a batch's logits, by one forward pass.

    The covariance may have negative eigenvalues, which this library's links bear. A
    `ValueError` if nothing was learnt, or the fit or the prior precision has changed
    since.
    """
    la.check_model()
    learnt = la.learnt_variance
    if learnt is None:
        raise ValueError(
            "No variance is learnt for this fit: call la.amortize(loader) first."
        )
    if not learnt.is_of(la.prior_precision, la._H_factor):
        raise ValueError(
            "The prior has changed since la.amortize(loader): call it again."
        )
    with la.model.forward_passes():
        f_mu, features = features_of(la, x)
        with torch.autocast(la.model.device.type, enabled=False):
            return Moments(f_mu, learnt.covariance(features))


def features_of(la: Posterior, inputs: Any) -> tuple[Tensor, Tensor]:
    """Compute logits `(B, C)`, and features `(B, p)` to learn variances from.

    Call it within a session.
    """
    logits, hidden = logits_and_hidden_states(la.model, inputs)
    features = logits
    if not la.task.has_noise:
        features = la.task.class_logits(logits).log_softmax(-1).flatten(1)
    if hidden is not None:
        features = torch.cat([hidden, features], dim=-1)
    return logits, features.to(la.blocks[0].statistics_dtype)


# --- what the layer that makes the logits reads ---------------------------------------


class _LayerCall(NamedTuple):
    """What a layer was given, and what it returned."""

    layer: nn.Module
    inputs: Tensor
    output: Tensor


def logits_and_hidden_states(
    model: LogitsModel, batch: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute logits `(B, C)` and their layer's inputs `(B, d)` in one pass.

    That layer is a language model's output layer, or else the linear layer whose
    outputs are the logits, at the positions where they are read: in a head of several
    layers the last one. Where there is none, as where a model changes its logits
    afterwards, there is only None.

    Call it within a session.
    """
    tree = model.tree
    output_layer = output_layer_of(model.transformer) if model.answers else None
    layers = tree.read_by
    if output_layer is not None:
        layers = [output_layer]
    elif layers is None:  # modules that have a matrix, as LoRA's have
        layers = [
            module
            for module in tree.modules
            if isinstance(weight := getattr(module, "weight", None), Tensor)
            and weight.ndim == 2
        ]
    calls: deque[_LayerCall] = deque(maxlen=_LAST)
    own = get_ident()

    def note(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # Routers of experts have a matrix for a weight too, and return tuples.
        if get_ident() == own and isinstance(output, Tensor):
            given = [value for value in args if isinstance(value, Tensor)]
            calls.extend(_LayerCall(layer, hidden, output) for hidden in given[:1])

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_hook(note).remove)
        logits = model(batch)
    # `(B, C)`, or of tokens `(B, T, C)`, nan where no row of logits is.
    by_text = model.in_places(logits, batch)
    for call in calls:
        hidden = _hidden_states(call, logits, by_text, output_layer is not None)
        if hidden is not None:
            tree.read_by = [call.layer]
            return logits, hidden
    tree.read_by = tree.read_by or []
    return logits, None


def _hidden_states(
    call: _LayerCall, logits: Tensor, by_text: Tensor, is_output_layer: bool
) -> Tensor | None:
    """Return the inputs of a layer if it made the logits, else None."""
    n_examples = len(by_text)
    rows = call.output.shape[:-1]
    if call.inputs.shape[:-1] != rows or not rows or rows[0] % n_examples:
        return None
    is_read = len(rows) == 2 and (rows[1] == 1 or rows[0] > n_examples)
    if is_output_layer and is_read:
        # It ran where answers are read, of choices first where their first tokens are
        # predicted. The model may cap or scale what it returned.
        at_first = call.inputs[:, 0].unflatten(0, (n_examples, -1))
        return at_first.mean(1).to(logits)
    if rows[0] != n_examples or call.output.shape[-1] != logits.shape[-1]:
        return None
    given = call.inputs.reshape(n_examples, -1, call.inputs.shape[-1])
    made = call.output.reshape(n_examples, -1, logits.shape[-1]).to(logits)
    if by_text.ndim == 3:
        places = ~by_text.isnan().any(-1)
        is_made = made.shape == by_text.shape and torch.equal(made[places], logits)
        return given[places.to(given.device)].to(logits) if is_made else None
    is_made = (made == logits[:, None]).all(-1)
    if not is_made.any(1).all():
        return None
    if given.shape[1] == 1:  # as in most classifiers
        return given[:, 0].to(logits)
    place = is_made.int().argmax(1)[:, None, None].to(given.device)
    return given.take_along_dim(place, dim=1)[:, 0].to(logits)
