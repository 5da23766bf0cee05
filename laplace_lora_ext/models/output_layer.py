"""The layer that makes a model's logits: what it reads, and how much at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from laplace_lora_ext.models.answers import output_layer_of
from laplace_lora_ext.models.logits_model import LogitsModel

# How many calls of layers are searched for the logits: the last ones, so that few
# activations are kept in memory.
_LAST = 8

_TOKENS = {"input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds"}


# --- what it reads --------------------------------------------------------------------


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
    output_layer = output_layer_of(model.transformer) if model.has_answers else None
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


# --- a few rows at a time -------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """Some of each text's labelled tokens, counted from its first one."""

    first: int
    size: int

    def of(self, labelled: Tensor) -> Tensor:
        """Mark which of the labelled ones among places `(B, T)` are of this part."""
        number = labelled.cumsum(1) - 1
        return labelled & (number >= self.first) & (number < self.first + self.size)


class LastStates:
    """What a model's output layer is given in its first pass, for further ones.

    It is of one batch and one set of weights. A further pass reads one token and is
    given a copy of these states: so the layer runs again, with whatever comes behind
    it, such as a cap of logits, and hardly anything else. Since they are copies, a
    model may overwrite what it is given.
    """

    def __init__(self, transformer: PreTrainedModel) -> None:
        self._transformer = transformer
        self._states: Tensor | None = None
        self._has_graph = False

    def call(self, call: Callable[[Any], Any], inputs: Any) -> Any:
        """Call a model on a batch, or give its output layer the states again."""
        layer = output_layer_of(self._transformer)
        if layer is None:  # nothing is kept, and all runs again
            return call(inputs)
        with layer.register_forward_pre_hook(self._give, prepend=True):
            if self._states is None:
                return call(inputs)
            # The layers before it have no graph: a recorder takes them for no calls.
            self._has_graph = torch.is_grad_enabled()
            with torch.no_grad():
                return call(self._one_token(inputs))

    def _give(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        states, *others = args
        if not states.is_floating_point():  # of a layer that is the embedding, too
            return None
        if self._states is None:
            self._states = states.clone()
            return None
        torch.set_grad_enabled(self._has_graph)
        return (self._states.clone(), *others)

    def _one_token(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Take the first token, which a model can read without masks and images."""
        first = {key: inputs[key][:1, :1] for key in _TOKENS & inputs.keys()}
        main = self._transformer.main_input_name  # of speech, say, all belongs together
        return {main: inputs[main][:1], **first} if main in inputs else first
