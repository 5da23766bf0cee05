"""What the layer reads that makes a model's logits: features of its inputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from laplace_lora_ext.models.logits_model import LogitsModel

# How many calls of layers are searched for the logits: the last ones, so that few
# activations are kept in memory.
_LAST = 8


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
    # Other threads may find another layer meanwhile.
    known = layers = tree.read_by
    if layers is None:
        layers = _candidates(model)
    logits, layer, hidden = _logits_and_layer(model, batch, layers)
    if known and layer is None:  # another layer makes them this time
        tree.read_by = None
        return logits_and_hidden_states(model, batch)
    if known is None:
        tree.read_by = [] if layer is None else [layer]
    return logits, hidden


def _logits_and_layer(
    model: LogitsModel, batch: Any, layers: Sequence[nn.Module]
) -> tuple[Tensor, nn.Module | None, Tensor | None]:
    """Compute logits; find which of some layers has made them, and its inputs."""
    calls: deque[_LayerCall] = deque(maxlen=_LAST)
    own = get_ident()

    # A thread that leaves may take another one's keywords with it.
    def note(layer: nn.Module, args: tuple[Any, ...], *kwargs: Any) -> None:
        if get_ident() != own:
            return
        *keywords, output = kwargs
        given = [*args, *(value for each in keywords for value in each.values())]
        given = [value for value in given if isinstance(value, Tensor)]
        # Routers of experts have a matrix for a weight too, and return tuples.
        if given and isinstance(output, Tensor):
            calls.append(_LayerCall(layer, given[0], output))

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_hook(note, with_kwargs=True).remove)
        logits = model(batch)
    is_output_layer = _output_layer(model) is not None
    by_place = None
    if model.places(batch) is not None:
        by_place = model.in_places(logits, batch)
    for call in calls:
        if by_place is None:
            hidden = _hidden_states(call, logits, is_output_layer)
        else:
            hidden = _hidden_states_of_tokens(call, by_place)
        if hidden is not None:
            return logits, call.layer, hidden
    return logits, None, None


def _output_layer(model: LogitsModel) -> nn.Module | None:
    """Find the layer that makes a language model's answers' logits."""
    if model.transformer is None or not model.has_answers:
        return None
    layer = model.transformer.get_output_embeddings()
    return layer if isinstance(layer, nn.Module) else None


def _candidates(model: LogitsModel) -> list[nn.Module]:
    """List the output layer, or else modules that have a matrix, as LoRA's have."""
    output_layer = _output_layer(model)
    if output_layer is not None:
        return [output_layer]
    return [
        module
        for module in model.tree.modules
        if isinstance(weight := getattr(module, "weight", None), Tensor)
        and weight.ndim == 2
    ]


def _hidden_states(
    call: _LayerCall, logits: Tensor, is_output_layer: bool
) -> Tensor | None:
    """Return the inputs of a layer if it made the logits `(B, C)`, else None."""
    n_examples, n_outputs = logits.shape
    rows = call.output.shape[:-1]
    if call.inputs.shape[:-1] != rows or not rows or rows[0] % n_examples:
        return None
    is_read = len(rows) == 2 and (rows[1] == 1 or rows[0] > n_examples)
    if is_output_layer and is_read:
        # It ran where answers are read, of choices first where their first tokens are
        # predicted. The model may cap or scale what it returned.
        at_first = call.inputs[:, 0].unflatten(0, (n_examples, -1))
        return at_first.mean(1).to(logits)
    if rows[0] != n_examples:
        return None
    if len(rows) == 1:
        is_all = torch.equal(call.output.to(logits), logits)
        return call.inputs.to(logits) if is_all else None
    given = call.inputs.reshape(n_examples, -1, call.inputs.shape[-1])
    made = call.output.reshape(n_examples, -1, call.output.shape[-1])
    if made.shape[-1] != n_outputs:
        return None
    is_made = (made.to(logits) == logits[:, None]).all(-1)
    if not is_made.any(1).all():
        return None
    first_made = is_made.int().argmax(1).to(given.device)
    place = first_made[:, None, None]
    return given.take_along_dim(place, dim=1)[:, 0].to(logits)


def _hidden_states_of_tokens(call: _LayerCall, by_place: Tensor) -> Tensor | None:
    """Return the inputs of a layer if it made tokens' logits, else None.

    The logits are `(B, T, C)`, nan where no row of logits is.
    """
    if call.output.shape != by_place.shape or call.inputs.ndim != by_place.ndim:
        return None
    is_read = ~by_place.isnan().any(-1)
    logits = by_place[is_read]
    if not torch.equal(call.output.to(logits)[is_read], logits):
        return None
    return call.inputs.to(logits)[is_read]
