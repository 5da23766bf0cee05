"""Runs transformers' `generate` on the posterior predictive of each next token."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from laplace_lora_ext.likelihoods import IGNORED
from laplace_lora_ext.models.weights import LoRAWeights
from laplace_lora_ext.text.perturbations import Draw
from laplace_lora_ext.text.scores import TextScores

# Methods that change a cache's rows or length between two passes.
_CHANGES = ("reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices", "reset")

_LOOKED_AT = 8  # tokens of a prompt on which to compare ways to multiply with Jacobians


@dataclass(frozen=True)
class GeneratedText:
    """What `generate` wrote.

    Attributes
    ----------
    sequences : torch.Tensor
        `(B, T)` tokens, the prompts first
    scores : TextScores
        of the generated tokens, under the same draws
    output : Any
        what transformers' `generate` returned
    """

    sequences: torch.Tensor
    scores: TextScores
    output: Any


@dataclass(frozen=True)
class Settings:
    """Options of `generate` that matter here, wherever they are set."""

    num_beams: int
    endings: list[int]
    padding: int | None

    @classmethod
    def of(cls, transformer: PreTrainedModel, generation_kwargs: Mapping[str, Any]) -> Settings:
        given = generation_kwargs.get("generation_config")
        configs = [given, getattr(transformer, "generation_config", None), transformer.config]

        def setting(name: str) -> Any:
            found = [generation_kwargs.get(name), *(getattr(c, name, None) for c in configs)]
            return next((value for value in found if value is not None), None)

        end = setting("eos_token_id")
        endings = [] if end is None else torch.as_tensor(end).flatten().tolist()
        return cls(setting("num_beams") or 1, endings, setting("pad_token_id"))


@dataclass(frozen=True)
class Prompt:
    """Prompts `(B, T)` with their mask, padded on the left."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor

    @classmethod
    def of(
        cls, generation_kwargs: Mapping[str, Any], settings: Settings, device: torch.device
    ) -> Prompt:
        """The prompts among `generate`'s arguments, with the mask that it takes or makes."""
        tokens = generation_kwargs.get("input_ids")
        if tokens is None:
            raise ValueError("Pass input_ids, as a tokenizer makes them.")
        mask = generation_kwargs.get("attention_mask")
        if mask is None:
            told = settings.padding is not None and settings.padding not in settings.endings
            mask = (tokens != settings.padding).long() if told else torch.ones_like(tokens)
        return cls(tokens.to(device), mask.to(device))

    def as_text(self) -> dict[str, torch.Tensor]:
        """The prompts as texts with a few labelled tokens."""
        # Repeat the last token: a single one would have nothing to predict.
        tokens = torch.cat([self.input_ids, self.input_ids[:, -1:]], dim=1)
        mask = torch.cat([self.attention_mask, torch.ones_like(self.attention_mask[:, :1])], dim=1)
        labelled = mask.bool()
        labelled[:, :-_LOOKED_AT] = False
        return _labelled(tokens, mask, labelled)

    def continued(self, sequences: torch.Tensor, settings: Settings) -> dict[str, torch.Tensor]:
        """Whole texts, with labels on generated tokens up to the first one that ends the text."""
        repeats = len(sequences) // len(self.input_ids)
        new = sequences[:, self.input_ids.shape[1] :]
        ends = torch.isin(new, torch.tensor(settings.endings, device=new.device, dtype=new.dtype))
        real = ends.cumsum(1) - ends.int() == 0
        if settings.padding is not None and settings.padding not in settings.endings:
            real &= (new != settings.padding).flip(1).cumsum(1).flip(1) > 0  # no padding to the end
        mask = self.attention_mask.repeat_interleave(repeats, dim=0)
        generated = torch.cat([torch.zeros_like(mask).bool(), real], dim=1)
        return _labelled(sequences, torch.cat([mask, real.to(mask)], dim=1), generated)


@contextmanager
def predictive(
    transformer: PreTrainedModel, weights: LoRAWeights, draws: Sequence[Draw], beams: bool
) -> Iterator[None]:
    """Replace the model's logits by log-probabilities of the mixture over draws.

    Everything in `generate` that acts on logits then sees these. A `LogitsProcessor` would come
    after transformers' own ones, and allow again what they forbid. Each pass of a draw has its own
    cache.

    Raises
    ------
    NotImplementedError
        For beams if the cache does not say when it changes.
    RuntimeError
        If the model was never called.
    """
    if not draws:
        yield
        return
    mixture = _Mixture(weights, draws, beams)
    handles = [
        transformer.register_forward_pre_hook(mixture.before, with_kwargs=True),
        transformer.register_forward_hook(mixture.after, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if not mixture.n_calls:
        raise RuntimeError(
            "generate did not call the model's forward pass: pass a model that is not compiled."
        )


class _Mixture:
    """Repeats each call of a model with the weights of each draw."""

    def __init__(self, weights: LoRAWeights, draws: Sequence[Draw], beams: bool) -> None:
        self.n_calls = 0
        self._weights, self._draws, self._beams = weights, draws, beams
        self._caches: list[list[Any]] = []
        self._repeating = False

    def before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook: when a text begins, with an empty cache, every pass gets a copy of that cache."""
        if self._repeating:
            return
        cache = kwargs.get("past_key_values")
        if self._beams and kwargs.get("use_cache") and not hasattr(cache, "reorder_cache"):
            raise NotImplementedError("Beam search needs a newer transformers, or use_cache=False.")
        if cache is None or (hasattr(cache, "get_seq_length") and not int(cache.get_seq_length())):
            self._caches = [[copy.deepcopy(cache) for _ in draw.weights] for draw in self._draws]
            _follow(cache, [one for of_draw in self._caches for one in of_draw])

    def after(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """A hook: replace the logits by the mixture's log-probabilities."""
        if self._repeating:
            return
        self.n_calls += 1
        f = output.logits.to(torch.promote_types(output.logits.dtype, torch.float32))
        log_p = torch.full_like(f, -math.inf)
        self._repeating = True
        try:
            for draw, caches in zip(self._draws, self._caches, strict=True):
                logits = [
                    self._pass(place, values, caches, args, kwargs).to(f)
                    for place, values in enumerate(draw.weights)
                ]
                log_p = torch.logaddexp(log_p, draw.combine(f, logits).log_softmax(-1))
        finally:
            self._repeating = False
        output.logits = log_p - math.log(len(self._draws))

    def _pass(
        self,
        place: int,
        values: list[torch.Tensor],
        caches: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        given = kwargs | ({} if caches[place] is None else {"past_key_values": caches[place]})
        output = self._weights.call(values, args, given)
        if kwargs.get("use_cache"):
            caches[place] = output.past_key_values
        return output.logits


def _follow(cache: Any, copies: Sequence[Any]) -> None:
    """Repeat on the copies whatever happens to a cache between passes."""

    def following(name: str) -> Any:
        method = getattr(cache, name)

        @wraps(method)
        def both(*args: Any, **kwargs: Any) -> Any:
            for one in copies:
                getattr(one, name)(*args, **kwargs)
            return method(*args, **kwargs)

        return both

    for name in _CHANGES:
        if hasattr(cache, name):
            setattr(cache, name, following(name))


def _labelled(
    tokens: torch.Tensor, mask: torch.Tensor, labelled: torch.Tensor
) -> dict[str, torch.Tensor]:
    labels = torch.where(labelled, tokens, IGNORED)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}
