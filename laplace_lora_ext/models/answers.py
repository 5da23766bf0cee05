"""Where a language model's logits are read: at answers, or anywhere in texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from laplace_lora_ext.models.batches import logits_of, refuse_empty, tokens_of

DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds")

ClassTokens = list[int] | list[list[int]]
"""The answer of each class: its token, or several of them."""

Call = Callable[[Any], Any]
"""Calls a model with inputs."""


class Answers:
    """How a language model's logits are those of answers.

    Attributes
    ----------
    class_token_ids : list of int, list of list of int, or None
        the answers, one a class; None where each batch brings its own
    mask_token_id : int or None
        the token at which a masked language model answers
    normalised : bool
        whether logits of several tokens are means, rather than sums
    decodes : bool
        whether the model reads one text, and writes another
    """

    class_token_ids: ClassTokens | None = None
    mask_token_id: int | None = None
    normalised: bool = False

    def __init__(
        self, transformer: PreTrainedModel | None, first_tokens: Sequence[int]
    ) -> None:
        self._transformer = transformer
        self._first_tokens = first_tokens  # which the answers begin with
        self.decodes = transformer is not None and transformer.config.is_encoder_decoder

    def rows(self, inputs: Any) -> Any:
        """Return the texts that the model reads, a row or several for each example."""
        return inputs

    def log_probs(self, inputs: Any, call: Call) -> Tensor:
        """Compute log-probabilities `(B, C + 1)` of `class_token_ids`, and all else.

        All else are texts that begin with other tokens than any answer.
        """
        logits, at_first = self.scores(inputs, call)
        of_vocabulary = in_full(at_first).log_softmax(-1)
        first = torch.tensor(self._first_tokens, device=of_vocabulary.device)
        of_any_answer = of_vocabulary[:, first].logsumexp(-1, keepdim=True)
        # Summed, rather than taken from 1, which cancels digits where the answers are
        # all but certain.
        others = of_vocabulary.index_fill(1, first, -torch.inf)
        of_others = others.logsumexp(-1, keepdim=True)
        log_p = in_full(logits).log_softmax(-1) + of_any_answer
        return torch.cat([log_p, of_others], dim=1)

    def scores(self, inputs: Any, call: Call) -> tuple[Tensor, Tensor]:
        """Compute logits `(B, C)`, and those `(B, V)` where answers begin."""
        raise NotImplementedError


class AnswerTokens(Answers):
    """The tokens that a language model answers with, one per class.

    The answer is read after the last real token of a causal language model, at the mask
    token of a masked one, and in an encoder-decoder after the decoder's start token, or
    after the decoder input that the batch gives. `transformer` is None for any other
    model that returns logits of a vocabulary.
    """

    def __init__(
        self,
        class_token_ids: list[int],
        transformer: PreTrainedModel | None,
        mask_token_id: int | None = None,
    ) -> None:
        super().__init__(transformer, class_token_ids)
        self.class_token_ids = class_token_ids
        self.mask_token_id = mask_token_id

    def scores(self, inputs: Any, call: Call) -> tuple[Tensor, Tensor]:
        text_with_answer = inputs
        if self.decodes:
            assert self._transformer is not None
            inputs = decoder_start(self._transformer, inputs)
            text_with_answer = decoder_text(inputs)
        index = self._position(inputs, text_with_answer)[:, None]
        n_positions = tokens_of(text_with_answer).shape[1]
        call_here = partial(call, inputs)
        read = logits_at(self._transformer, index, n_positions, call_here)[:, 0]
        return read[:, self._first_tokens], read

    def _position(self, inputs: Any, text_with_answer: Any) -> Tensor:
        """Find the position at which the answer is read, `(B,)`."""
        if self.mask_token_id is None:
            return last_real_position(text_with_answer)
        is_mask = inputs["input_ids"] == self.mask_token_id
        if (is_mask.sum(-1) != 1).any():
            raise ValueError(
                f"Each text must have one mask token {self.mask_token_id}, but those "
                f"of the batch have {is_mask.sum(-1).tolist()}."
            )
        return is_mask.int().argmax(-1)


def in_full(logits: Tensor) -> Tensor:
    """Return logits in float32 or better."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def decoder_text(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Select a decoder's inputs, under the names of other models' inputs."""
    prefix = "decoder_"
    text: dict[str, Any] = {}
    for key, value in inputs.items():
        if key.startswith(prefix):
            text[key.removeprefix(prefix)] = value
    return text


def first_places(places: Tensor) -> tuple[Tensor, Tensor]:
    """Index the true places of `(N, T)` booleans, in order: `(N, M)`.

    M is the largest number that a row has.

    Also returns which of the index are true ones, `(N, M)`.
    """
    most = int(places.sum(1).max())
    # Stable, so that true ones keep their order among themselves.
    true_first = places.int().argsort(dim=1, descending=True, stable=True)
    index = true_first[:, :most]
    return index, places.take_along_dim(index, dim=1)


def output_layer_of(transformer: PreTrainedModel | None) -> nn.Module | None:
    """Find the layer that makes logits of a vocabulary."""
    return None if transformer is None else transformer.get_output_embeddings()


def logits_at(
    transformer: PreTrainedModel | None,
    index: Tensor,
    n_positions: int,
    call: Callable[[], Any],
) -> Tensor:
    """Call a model, and return logits `(B, K, V)` at the `(B, K)` places of an index.

    Its output layer runs for these alone among the T positions. A hook selects: not
    every model and version has an option for it, that option wants the index on the
    hidden states' device, and the layer may have LoRA, whose rows must still lie by
    text.
    """
    calls: list[torch.Size] = []

    def select(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not args or not isinstance(args[0], Tensor):
            return None
        hidden, *others = args
        # An output layer that is also the embedding sees tokens as well.
        if hidden.shape[:-1] != (len(index), n_positions):
            return None
        calls.append(hidden.shape)
        places = index.to(hidden.device)[..., None]
        return (hidden.take_along_dim(places, dim=1), *others)

    layer = output_layer_of(transformer)
    hook = nullcontext() if layer is None else layer.register_forward_pre_hook(select)
    with hook:
        logits = logits_of(call())
    if logits.ndim != 3:
        raise ValueError(
            "class_token_ids need logits of shape (batch, positions, vocabulary), "
            f"not {tuple(logits.shape)}: leave them out for a model that returns "
            "logits of classes."
        )
    if calls:
        return logits
    if logits.shape[1] != n_positions:
        raise ValueError(
            f"The model returns logits at {logits.shape[1]} positions for texts of "
            f"{n_positions} tokens, perhaps because images come first. Let its "
            "forward pass return only the logits of the texts' tokens."
        )
    return logits.take_along_dim(index.to(logits.device)[..., None], dim=1)


def decoder_start(
    transformer: PreTrainedModel, inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Give the decoder a start token for each text, unless it has an input."""
    if any(inputs.get(key) is not None for key in DECODER_INPUTS):
        return dict(inputs)
    tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
    texts = next(tensor for tensor in tensors if tensor.ndim > 1)
    start = start_token(transformer)
    starts = texts.new_full((len(texts), 1), start, dtype=torch.long)
    return {**inputs, "decoder_input_ids": starts}


def start_token(transformer: PreTrainedModel) -> int:
    """Return the token that starts an encoder-decoder's answer; an error if none."""
    for config in (transformer.config, transformer.generation_config):
        start = getattr(config, "decoder_start_token_id", None)
        if start is not None:
            return start
    raise ValueError(
        "The model has no decoder_start_token_id: add decoder_input_ids to the batch."
    )


def last_real_position(inputs: Any) -> Tensor:
    """Find the last position that is not padding, `(B,)`, whichever side is padded.

    A text without any is refused.
    """
    text = tokens_of(inputs)
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if mask is None:
        last = text.shape[1] - 1
        return torch.full((len(text),), last, device=text.device)
    if mask.shape != text.shape[:2]:
        raise NotImplementedError(
            f"An attention_mask of shape {tuple(mask.shape)} does not show where each "
            f"text ends: pass one of shape {tuple(text.shape[:2])}."
        )
    refuse_empty(mask)
    mask = mask.bool()
    positions = torch.arange(mask.shape[1], device=mask.device)
    return (mask * positions).argmax(-1)
