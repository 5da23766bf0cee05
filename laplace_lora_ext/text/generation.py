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
from transformers.modeling_outputs import BaseModelOutput

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
        `(B, T)` tokens, the prompts first; what an encoder-decoder's decoder reads and writes
    scores : TextScores
        of the generated tokens, under the same draws; an encoder-decoder's have no place for the
        first token of `sequences`, which nothing predicts
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

    def is_padding(self, tokens: torch.Tensor) -> torch.Tensor:
        """Which tokens are padding; none if the token of padding also ends texts."""
        if self.padding is None or self.padding in self.endings:
            return torch.zeros_like(tokens, dtype=torch.bool)
        return tokens == self.padding

    def written(self, new: torch.Tensor) -> torch.Tensor:
        """`(B, T)` booleans, true up to the first of the generated tokens that ends the text."""
        ends = torch.isin(new, torch.tensor(self.endings, device=new.device, dtype=new.dtype))
        before_end = ends.cumsum(1) - ends.int() == 0
        more_to_come = (~self.is_padding(new)).flip(1).cumsum(1).flip(1) > 0
        return before_end & more_to_come


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
            mask = (~settings.is_padding(tokens)).long()
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
        new = settings.written(sequences[:, self.input_ids.shape[1] :])
        mask = repeated(self.attention_mask, len(sequences))
        generated = torch.cat([torch.zeros_like(mask).bool(), new], dim=1)
        return _labelled(sequences, torch.cat([mask, new.to(mask)], dim=1), generated)


@dataclass(frozen=True)
class Source(Prompt):
    """Texts `(B, T)` for the encoder of an encoder-decoder, and what its decoder begins with."""

    decoder_input_ids: torch.Tensor | None = None

    @classmethod
    def of(
        cls, generation_kwargs: Mapping[str, Any], settings: Settings, device: torch.device
    ) -> Source:
        texts = Prompt.of(generation_kwargs, settings, device)
        begun = generation_kwargs.get("decoder_input_ids")
        begun = None if begun is None else begun.to(device)
        return cls(texts.input_ids, texts.attention_mask, begun)

    def as_text(self) -> dict[str, torch.Tensor]:
        """The texts, each with its own first tokens to be written."""
        looked_at = torch.arange(self.input_ids.shape[1], device=self.input_ids.device) < _LOOKED_AT
        labelled = self.attention_mask.bool() & looked_at
        return _labelled(self.input_ids, self.attention_mask, labelled)

    def continued(self, sequences: torch.Tensor, settings: Settings) -> dict[str, torch.Tensor]:
        """The texts, with what the decoder read and, as labels, what it wrote."""
        begun = self._n_begun(sequences)
        written = torch.zeros_like(sequences, dtype=torch.bool)
        written[:, begun:] = settings.written(sequences[:, begun:])
        return {
            "input_ids": repeated(self.input_ids, len(sequences)),
            "attention_mask": repeated(self.attention_mask, len(sequences)),
            "decoder_input_ids": sequences[:, :-1],
            "labels": torch.where(written, sequences, IGNORED)[:, 1:],
        }

    def _n_begun(self, sequences: torch.Tensor) -> int:
        """How many tokens the decoder began with: transformers may put one before those given."""
        if self.decoder_input_ids is None:
            return 1
        given = repeated(self.decoder_input_ids, len(sequences))
        return given.shape[1] + (not torch.equal(sequences[:, : given.shape[1]], given))


def repeated(values: torch.Tensor, n_rows: int) -> torch.Tensor:
    """Each row as often as `generate` repeats it, for beams or several texts of a prompt."""
    return values.repeat_interleave(n_rows // len(values), dim=0)


@contextmanager
def predictive(
    transformer: PreTrainedModel,
    weights: LoRAWeights,
    draws: Sequence[Draw],
    prompt: Prompt,
    beams: bool,
) -> Iterator[None]:
    """Replace the model's logits by log-probabilities of the mixture over draws.

    Everything in `generate` that acts on logits then sees these. A `LogitsProcessor` would come
    after transformers' own ones, and allow again what they forbid. Each pass of a draw has its own
    cache and, of an encoder-decoder, its own encoding of the prompt.

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
    mixture = _Mixture(weights, draws, prompt, beams)
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

    def __init__(
        self, weights: LoRAWeights, draws: Sequence[Draw], prompt: Prompt, beams: bool
    ) -> None:
        self.n_calls = 0
        self._weights, self._draws, self._prompt = weights, draws, prompt
        self._beams = beams
        self._kept: list[list[dict[str, Any]]] = []  # of each pass of each draw
        self._repeating = False

    def before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook: when a text begins, with an empty cache, every pass gets a copy of that cache."""
        if self._repeating:
            return
        cache = kwargs.get("past_key_values")
        if self._beams and kwargs.get("use_cache") and not hasattr(cache, "reorder_cache"):
            raise NotImplementedError("Beam search needs a newer transformers, or use_cache=False.")
        if cache is None or (hasattr(cache, "get_seq_length") and not int(cache.get_seq_length())):
            self._kept = [
                [{"past_key_values": copy.deepcopy(cache)} for _ in draw.weights]
                for draw in self._draws
            ]
            _follow(cache, [kept["past_key_values"] for of_draw in self._kept for kept in of_draw])

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
            for draw, of_draw in zip(self._draws, self._kept, strict=True):
                logits = [
                    self._pass(values, kept, args, kwargs).to(f)
                    for values, kept in zip(draw.weights, of_draw, strict=True)
                ]
                log_p = torch.logaddexp(log_p, draw.combine(f, logits).log_softmax(-1))
        finally:
            self._repeating = False
        output.logits = log_p - math.log(len(self._draws))

    def _pass(
        self,
        values: list[torch.Tensor],
        kept: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """Logits with other weights, which keeps its cache and its encoding for the next token."""
        given = kwargs | {name: value for name, value in kept.items() if value is not None}
        if kwargs.get("encoder_outputs") is not None and "encoder_outputs" not in kept:
            rows = len(kwargs["decoder_input_ids"])
            given |= {"encoder_outputs": None, "input_ids": repeated(self._prompt.input_ids, rows)}
        output = self._weights.call(values, args, given)
        if kwargs.get("use_cache"):
            kept["past_key_values"] = output.past_key_values
        if kwargs.get("encoder_outputs") is not None:
            kept["encoder_outputs"] = BaseModelOutput(output.encoder_last_hidden_state)
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
