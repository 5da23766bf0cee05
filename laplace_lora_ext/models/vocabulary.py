"""Logits of a vocabulary, a stated number of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformers import PreTrainedModel

from laplace_lora_ext.models.answers import first_places, reading_at

MOST_ROWS = 1024
"""Most rows of a vocabulary's logits that a part of a batch has."""

_TOKENS = {"input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds"}

Reading = Callable[[Tensor], Tensor]
"""Takes logits `(n, V)` of some rows, and returns `(n, ...)` that is read off them."""


@dataclass(frozen=True)
class Span:
    """Some of each text's labelled tokens, counted from its first one."""

    first: int
    size: int

    def of(self, labelled: Tensor) -> Tensor:
        """Mark which of the labelled ones among places `(B, T)` are of this part."""
        number = labelled.cumsum(1) - 1
        return labelled & (number >= self.first) & (number < self.first + self.size)


def parts_of(places: Tensor) -> list[Span]:
    """Divide the true ones of places `(N, T)`: a part has at most `MOST_ROWS`.

    Of more texts N than that, a part has a place of each.
    """
    size = max(1, MOST_ROWS // len(places))
    most = int(places.sum(1).max())
    return [Span(first, size) for first in range(0, most, size)]


def logits_at(
    transformer: PreTrainedModel | None, places: Tensor, call: Callable[[], Any]
) -> Tensor:
    """Call a model, and return logits `(n, V)` at the true ones of `(N, T)` places."""
    index, is_true = first_places(places)
    with reading_at(transformer, index, places.shape[1]) as read_off:
        logits = read_off(call())
    if is_true.all():
        return logits.flatten(0, 1)  # without a copy
    return logits[is_true.to(logits.device)]


def read_in_parts(
    places: Tensor,
    parts: Sequence[Span],
    logits: Callable[[Span], Tensor],
    reading: Callable[[Tensor], Reading],
) -> Tensor:
    """Read `(n, ...)` off logits at the true ones of `(N, T)` places; keep no logits.

    `logits` takes a part, and calls the model by `LastStates`. `reading` takes an index
    of rows, and tells how to read these. A backward pass computes the logits of one
    part after the other anew.
    """

    def compute(part: Span, read: Reading) -> Tensor:
        return read(logits(part))

    # The layers before the output layer run here, and never again.
    logits(Span(first=0, size=1))
    rows: list[Tensor] = []
    of_parts: list[Tensor] = []
    for part in parts:
        own = part.of(places)[places].nonzero()[:, 0]
        # A model's hooks are to see whole passes.
        with set_checkpoint_early_stop(False):
            of_part = checkpoint(compute, part, reading(own), use_reentrant=False)
        rows.append(own)
        of_parts.append(of_part)
    in_order = torch.cat(rows).argsort()
    read = torch.cat(of_parts)
    return read[in_order.to(read.device)]


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

    def call(self, call: Callable[..., Any], inputs: Any, **kwargs: Any) -> Any:
        """Call a model on a batch, or give its output layer the states again."""
        layer = self._transformer.get_output_embeddings()
        if not isinstance(layer, nn.Module):  # nothing is kept, and all runs again
            return call(inputs, **kwargs)
        with layer.register_forward_pre_hook(self._give, prepend=True):
            if self._states is None:
                return call(inputs, **kwargs)
            # The layers before it have no graph: a recorder takes them for no calls.
            self._has_graph = torch.is_grad_enabled()
            with torch.no_grad():
                without_cache = dict.fromkeys(kwargs.keys() & {"use_cache"}, False)
                return call(self._one_token(inputs), **without_cache)

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
