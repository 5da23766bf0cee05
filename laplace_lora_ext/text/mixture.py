"""The posterior predictive of each next token, from passes with the weights of every draw."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from laplace_lora_ext.models.default_device import as_tensor
from laplace_lora_ext.models.weights import LoRAWeights, Values
from laplace_lora_ext.text import joined
from laplace_lora_ext.text.perturbations import Draw, combined
from laplace_lora_ext.text.prompts import Given
from laplace_lora_ext.undoing import removing_hooks, undoing

# Methods that change a cache's rows or length between two passes; the first two are given rows.
_CHANGES_OF_ROWS = ("reorder_cache", "batch_select_indices")
_CHANGES = (*_CHANGES_OF_ROWS, "crop", "batch_repeat_interleave", "reset")

_ENCODED = ("encoder_outputs", "mm_encoder_outputs")  # what `generate` runs encoders for
_STATES = ("cache_params", "state", "mems", "past_buckets_states")  # other things that models keep


@contextmanager
def predictive(
    transformer: PreTrainedModel,
    weights: LoRAWeights,
    draws: Sequence[Draw],
    prompt: Given,
    beams: bool,
    known: dict[Any, bool],
) -> Iterator[None]:
    """Replace the model's logits by log-probabilities of the mixture over draws.

    Everything in `generate` that acts on logits then sees these. A `LogitsProcessor` would come
    after transformers' own ones, and allow again what they forbid. The passes of all draws run as
    one batch, if that gives what a pass alone gives, and if their prompts are not too long. `known`
    keeps what the first text with inputs of some names has proven.

    Raises
    ------
    NotImplementedError
        For beams if the cache does not say when it changes, and for a model that keeps no cache or
        is given one that holds a text already.
    RuntimeError
        If the model was never called.
    """
    if not draws:
        yield
        return
    mixture = _Mixture(weights, draws, prompt, beams, known)
    with undoing(mixture.let_go), removing_hooks() as handles:
        handles.append(transformer.register_forward_pre_hook(mixture.before, with_kwargs=True))
        handles.append(transformer.register_forward_hook(mixture.after, with_kwargs=True))
        yield
    if not mixture.n_calls:
        raise RuntimeError(
            "generate did not call the model's forward pass: pass a model that is not compiled."
        )


class _ModelCall:
    """A call of the model; `f` are the logits that came of it, in float32 or better."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], logits: torch.Tensor) -> None:
        self.args, self.kwargs = args, kwargs
        self.f = logits.to(torch.promote_types(logits.dtype, torch.float32))


class _Passes:
    """Passes that run as one batch: its rows are those of each pass, one after the other.

    They have a cache of their own and, of an encoder-decoder, their own encoding of the prompt.

    Parameters
    ----------
    weights : LoRAWeights
    each : sequence of Values
        the weights of each pass
    prompt : Prompt
    cache : Any
        an empty one, or None
    """

    def __init__(
        self, weights: LoRAWeights, each: Sequence[Values], prompt: Given, cache: Any
    ) -> None:
        self._n, self._weights, self._prompt = len(each), weights, prompt
        self._values = [torch.stack(of) for of in zip(*each, strict=True)] if each[1:] else each[0]
        self._kept: dict[str, Any] = {"past_key_values": cache}

    def logits(self, call: _ModelCall) -> Sequence[torch.Tensor]:
        """Logits of each pass."""
        kwargs, n_rows = call.kwargs, len(call.f)
        of_all = self._tiled(kwargs, n_rows)
        of_all |= {name: value for name, value in self._kept.items() if value is not None}
        decodes = kwargs.get("encoder_outputs") is not None
        for name in _ENCODED:
            # Those of the trained weights: with others, encoders read the prompt anew.
            if kwargs.get(name) and name not in self._kept:
                of_all |= {name: None} | self._tiled(self._prompt.encoded(n_rows), n_rows)
        args = self._tiled(call.args, n_rows)
        if self._n == 1:
            output = self._weights.call(self._values, args, of_all)
        else:
            output = self._weights.call_joined(self._values, n_rows, args, of_all)
        self._kept["past_key_values"] = getattr(output, "past_key_values", None)
        if decodes:
            self._kept["encoder_outputs"] = BaseModelOutput(output.encoder_last_hidden_state)
        return output.logits.chunk(self._n)

    def follow(self, name: str, n_rows: int, args: tuple[Any, ...], kwargs: Any) -> None:
        """Change the cache as that of the model's own passes, which has `n_rows` rows."""
        if name in _CHANGES_OF_ROWS:
            (rows,) = (*args, *kwargs.values())
            rows = torch.cat([as_tensor(rows) + n_rows * place for place in range(self._n)])
            args, kwargs = (rows,), {}
        getattr(self._kept["past_key_values"], name)(*args, **kwargs)

    def _tiled(self, given: Any, n_rows: int) -> Any:
        """All tensors of the batch, once for each pass."""
        if isinstance(given, torch.Tensor):
            of_batch = given.ndim > 1 and len(given) == n_rows
            return given.repeat(self._n, *[1] * (given.ndim - 1)) if of_batch else given
        if isinstance(given, dict):
            return {name: self._tiled(value, n_rows) for name, value in given.items()}
        return (
            tuple(self._tiled(one, n_rows) for one in given) if isinstance(given, tuple) else given
        )


class _Mixture:
    """Repeats each call of a model with the weights of each draw."""

    def __init__(
        self,
        weights: LoRAWeights,
        draws: Sequence[Draw],
        prompt: Given,
        beams: bool,
        known: dict[Any, bool],
    ) -> None:
        self.n_calls = 0
        self._weights, self._draws, self._prompt = weights, draws, prompt
        self._beams, self._known = beams, known
        # A logits processor may read another text in turn, with a cache of its own.
        self._texts: list[tuple[Any, list[_Passes]]] = []
        self._followed: list[tuple[Any, str]] = []
        self._empty_cache: Any = None
        self._begins = False
        self._n_rows = 0
        self._repeating = False

    def before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook: when a text begins, with an empty cache, keep a copy of that for every pass."""
        if self._repeating:
            return
        cache = kwargs.get("past_key_values")
        if self._beams and kwargs.get("use_cache") and not hasattr(cache, "reorder_cache"):
            raise NotImplementedError("Beam search needs a newer transformers, or use_cache=False.")
        self._begins = cache is None or (
            hasattr(cache, "get_seq_length") and not int(cache.get_seq_length())
        )
        self._empty_cache = copy.deepcopy(cache) if self._begins else None

    def after(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """A hook: replace the logits by the mixture's log-probabilities."""
        if self._repeating:
            return
        self.n_calls += 1
        call = _ModelCall(args, kwargs, output.logits)
        log_p = torch.full_like(call.f, -math.inf)
        self._n_rows = len(log_p)
        self._repeating = True
        try:
            passes = self._passes(call, getattr(output, "past_key_values", None))
            outputs = (logits.to(call.f) for some in passes for logits in some.logits(call))
            for logits in combined(self._draws, outputs, call.f):
                log_p = torch.logaddexp(log_p, logits.log_softmax(-1))
        finally:
            self._repeating = False
        output.logits = log_p - math.log(len(self._draws))

    def _passes(self, call: _ModelCall, cache: Any) -> list[_Passes]:
        """The passes that read this text; `cache` is what the model keeps of it.

        Raises
        ------
        NotImplementedError
            If the model keeps something else, or what it was given is of no text that began here.
        """
        given = call.kwargs.get("past_key_values")
        keeps = call.kwargs.get("use_cache") or any(
            call.kwargs.get(name) is not None for name in _STATES
        )
        if keeps and cache is None:
            raise NotImplementedError(
                "The model keeps what it has read in no past_key_values, which draws need for "
                "themselves: pass use_cache=False."
            )
        known = [passes for of, passes in self._texts if of is _identity(given or cache)]
        if self._begins and known:
            raise NotImplementedError(
                "A logits processor reads another text, whose cache can't be told from the first: "
                "take a newer transformers, or use_cache=False."
            )
        if not (self._begins or known):
            raise NotImplementedError(
                "generate was given past_key_values that hold a text already, which no draw has "
                "read: leave them out."
            )
        if known:
            return known[0]
        passes = self._first_passes(call)
        if cache is not None:
            self._texts.append((_identity(cache), passes))
            self._follow(cache, passes)
        return passes

    def _first_passes(self, call: _ModelCall) -> list[_Passes]:
        """The draws' passes, as few batches as possible."""
        each = [values for draw in self._draws for values in draw.weights]
        n_tokens = self._n_rows * self._prompt.length
        at_once = min(len(each), joined.TOKENS_AT_ONCE // n_tokens)
        if at_once < 2 or not (self._prompt.can_join and self._can_join(call)):
            at_once = 1
        return [self._new(each[start : start + at_once]) for start in range(0, len(each), at_once)]

    def _can_join(self, call: _ModelCall) -> bool:
        """Whether passes as one batch are right; the first call with such inputs proves it."""
        given = "joined passes", *sorted(k for k, value in call.kwargs.items() if value is not None)
        if given not in self._known:

            def logits(each: Sequence[Values]) -> Sequence[torch.Tensor]:
                return self._new(each).logits(call)

            self._known[given] = joined.joins(self._weights, logits)
        return self._known[given]

    def _new(self, each: Sequence[Values]) -> _Passes:
        """Passes with an empty cache."""
        return _Passes(self._weights, each, self._prompt, copy.deepcopy(self._empty_cache))

    def _follow(self, cache: Any, of_text: Sequence[_Passes]) -> None:
        """Repeat on the passes' caches whatever happens to one between calls."""

        def following(name: str) -> Any:
            method = getattr(cache, name)

            @wraps(method)
            def both(*args: Any, **kwargs: Any) -> Any:
                for passes in of_text:
                    passes.follow(name, self._n_rows, args, kwargs)
                return method(*args, **kwargs)

            return both

        for name in _CHANGES:
            if hasattr(cache, name):
                self._followed.append((cache, name))
                setattr(cache, name, following(name))

    def let_go(self) -> None:
        """Leave caches, which `generate` may return, as they are without draws."""
        for cache, name in self._followed:
            vars(cache).pop(name, None)


def _identity(cache: Any) -> Any:
    """What stays the same from call to call; tuples of older transformers don't."""
    return tuple if isinstance(cache, tuple) else cache
