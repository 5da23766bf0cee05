"""The posterior predictive of each next token, from passes with the weights of every draw."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from laplace_lora_ext.models.weights import LoRAWeights, Values
from laplace_lora_ext.undoing import removing_hooks

_CACHES = ("cache", "past_key_values", "cache_params")  # what transformers' versions call theirs
_STATES = ("state", "mems", "past_buckets_states")  # other things that models keep


@contextmanager
def predictive(
    transformer: PreTrainedModel,
    weights: LoRAWeights,
    draws: Sequence[Values],
    text: Mapping[str, torch.Tensor],
) -> Iterator[None]:
    """Replace the model's logits by log-probabilities of the mixture over draws, for one text.

    Everything in `generate` that acts on logits then sees these. A `LogitsProcessor` would come
    after transformers' own ones, and allow again what they forbid. Each draw has a cache of its own
    and, of an encoder-decoder, its own encoding of the source.

    Raises
    ------
    NotImplementedError
        If the model keeps what it has read in anything but a cache, or reads another text in turn.
    RuntimeError
        If the model was never called.
    """
    if not draws:
        yield
        return
    mixture = _Mixture(weights, draws, text)
    with removing_hooks() as handles:
        handles.append(transformer.register_forward_pre_hook(mixture.before, with_kwargs=True))
        handles.append(transformer.register_forward_hook(mixture.after))
        yield
    if mixture.log_p is None:
        raise RuntimeError(
            "generate did not call the model's forward pass: pass a model that is not compiled."
        )


class _Mixture:
    """Runs each call of a model with the weights of each draw before its own."""

    def __init__(
        self,
        weights: LoRAWeights,
        draws: Sequence[Values],
        text: Mapping[str, torch.Tensor],
    ) -> None:
        self.log_p: torch.Tensor | None = None
        self._weights, self._draws = weights, draws
        self._source = {k: of for k, of in text.items() if not k.startswith("decoder_")}
        self._kept: list[dict[str, Any]] = [{} for _ in draws]
        self._repeating = False

    def before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook: before the model's own pass, so that its cache still is what the draws know."""
        if self._repeating:
            return
        self._repeating = True
        try:
            log_p: Any = None
            for values, kept in zip(self._draws, self._kept, strict=True):
                of_draw = self._logits(values, kept, args, kwargs).log_softmax(-1)
                log_p = of_draw if log_p is None else torch.logaddexp(log_p, of_draw)
            self.log_p = log_p - math.log(len(self._draws))
        finally:
            self._repeating = False

    def after(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A hook: replace the logits by the mixture's log-probabilities."""
        if not self._repeating:
            output.logits = self.log_p

    def _logits(
        self, values: Values, kept: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """A draw's logits; what it keeps for the next call is changed in place."""
        name = next((name for name in _CACHES if name in kwargs), None)
        given = None if name is None else kwargs[name]
        if not kept:
            kept["cache"] = copy.deepcopy(given)
        if _size(given) != _size(kept["cache"]):
            raise NotImplementedError(
                "Something in generate reads another text in turn, or changes the model's cache, "
                "which draws can't follow: leave it out, or pass use_cache=False."
            )
        own = {} if name is None else {name: kept["cache"]}
        if kwargs.get("encoder_outputs") is not None:
            # Those of the trained weights: with others, encoders read the source anew.
            own["encoder_outputs"] = kept.get("encoder_outputs")
            own |= self._source if own["encoder_outputs"] is None else {}
        output = self._weights.call(values, args, kwargs | own)
        kept["cache"] = None if name is None else getattr(output, name, None)
        keeps = kwargs.get("use_cache") and kept["cache"] is None
        if keeps or any(kwargs.get(state) is not None for state in _STATES):
            raise NotImplementedError(
                "The model keeps what it has read in no cache, which draws need for themselves: "
                "pass use_cache=False."
            )
        if "encoder_outputs" in own:
            kept["encoder_outputs"] = BaseModelOutput(output.encoder_last_hidden_state)
        return output.logits.to(torch.promote_types(output.logits.dtype, torch.float32))


def _size(cache: Any) -> Any:
    """How much a cache holds, to compare with another of its kind."""
    if isinstance(cache, tuple):
        return cache[0][0].shape
    try:
        return int(cache.get_seq_length())
    except (AttributeError, ValueError):  # None, or what counts no positions
        return None
