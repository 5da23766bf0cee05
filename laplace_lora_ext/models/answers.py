"""Class logits of a language model: those of the answers' tokens where the answer is read."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from laplace_lora_ext.messages import warn
from laplace_lora_ext.models.batches import text_config
from laplace_lora_ext.models.output_layer import selecting


class AnswerTokens:
    """The tokens that a language model answers with, one per class.

    The answer is read after the last real token of a causal language model, at the mask token of a
    masked one, and in an encoder-decoder after the decoder's start token, or after the decoder
    input that the batch gives.

    Parameters
    ----------
    class_token_ids : sequence of int
    transformer : PreTrainedModel or None
        None for any other model that returns logits of a vocabulary
    mask_token_id : int, optional
        for a masked language model

    Raises
    ------
    ValueError
        If a token repeats or lies outside the vocabulary, if there are fewer than two, or if
        `mask_token_id` is missing for a masked language model.
    """

    def __init__(
        self,
        class_token_ids: Sequence[int],
        transformer: PreTrainedModel | None,
        mask_token_id: int | None = None,
    ) -> None:
        config = None if transformer is None else text_config(transformer)
        vocabulary = getattr(config, "vocab_size", None)
        ids = [int(token) for token in class_token_ids]
        if len(ids) < 2 or len(set(ids)) < len(ids):
            raise ValueError(f"class_token_ids must be two or more distinct tokens, not {ids}.")
        if min(ids) < 0 or (vocabulary is not None and max(ids) >= vocabulary):
            raise ValueError(
                f"class_token_ids {ids} are not all in the model's vocabulary: take them from its "
                "tokenizer."
            )
        if transformer is not None and _is_masked(transformer) and mask_token_id is None:
            raise ValueError(
                f"{type(transformer).__name__} is a masked language model, which answers at the "
                "mask token: pass mask_token_id=tokenizer.mask_token_id."
            )
        self.ids = ids
        self.mask_token_id = mask_token_id
        self._transformer = transformer

    def options(self, inputs: Any, counts_positions: bool) -> dict[str, Any]:
        """Keyword arguments that the decoder accepts and the batch lacks.

        `counts_positions` asks for positions that count from the first real token.
        """
        if self._transformer is None:
            return {}
        options = decoder_options(self._transformer, inputs, counts_positions)
        if self._transformer.config.is_encoder_decoder:
            options |= self._start(inputs if isinstance(inputs, Mapping) else {})
        return options

    @contextmanager
    def reading(self, inputs: Any, options: Mapping[str, Any]) -> Iterator[None]:
        """Within, the output layer sees only the positions at which answers are read."""
        if self._transformer is None or "decoder_input_ids" in options:  # which is one token
            yield
            return
        index = self._position(inputs)[:, None]
        with selecting(self._transformer, index, n_positions(self._read(inputs))):
            yield

    def select(self, logits: torch.Tensor, inputs: Any) -> torch.Tensor:
        """Logits `(B, T, V)` of the vocabulary to `(B, C)` of the answers."""
        return self._at_answer(logits, inputs)[:, self.ids]

    def log_probs(self, logits: torch.Tensor, inputs: Any) -> torch.Tensor:
        """Log-probabilities `(B, C + 1)` of the answers, and of all other tokens together."""
        log_p = self._at_answer(logits, inputs).float().log_softmax(-1)
        others = log_p.index_fill(1, torch.tensor(self.ids, device=log_p.device), -torch.inf)
        return torch.cat([log_p[:, self.ids], others.logsumexp(-1, keepdim=True)], dim=1)

    def _at_answer(self, logits: torch.Tensor, inputs: Any) -> torch.Tensor:
        """`(B, V)`."""
        if logits.ndim != 3:
            raise ValueError(
                "class_token_ids need logits of shape (batch, positions, vocabulary), not "
                f"{tuple(logits.shape)}: leave them out for a model that returns logits of classes."
            )
        if logits.shape[1] > 1:
            position = self._position(inputs)[:, None, None]
            check_positions(logits, n_positions(self._read(inputs)))
            logits = logits.take_along_dim(position.to(logits.device), dim=1)
        return logits[:, 0]

    def warn_if_answered(self, inputs: Any) -> None:
        """Warn if every text already ends with an answer, which a prompt should leave out."""
        tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
        decodes = self._transformer is not None and self._transformer.config.is_encoder_decoder
        if tokens is None or tokens.ndim != 2 or decodes or self.mask_token_id is not None:
            return
        last = tokens.take_along_dim(last_real_position(inputs)[:, None], dim=1)
        if torch.isin(last, torch.tensor(self.ids, device=last.device)).all():
            warn(
                "Every text of the batch ends with one of class_token_ids, but the model predicts "
                "what comes next: leave the answers out of the prompts."
            )

    def _start(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The decoder's start token for each text, unless the batch has a decoder input."""
        if given.get("decoder_input_ids") is not None or "decoder_inputs_embeds" in given:
            return {}
        assert self._transformer is not None
        start = start_token(self._transformer)
        texts = next(v for v in given.values() if isinstance(v, torch.Tensor) and v.ndim > 1)
        return {"decoder_input_ids": texts.new_full((len(texts), 1), start, dtype=torch.long)}

    def _position(self, inputs: Any) -> torch.Tensor:
        """`(B,)` index of the position at which the answer is read."""
        if self.mask_token_id is not None:
            is_mask = inputs["input_ids"] == self.mask_token_id
            if (is_mask.sum(-1) != 1).any():
                counts = is_mask.sum(-1).tolist()
                raise ValueError(
                    f"Each text must have one mask token {self.mask_token_id}, but those of the "
                    f"batch have {counts}."
                )
            return is_mask.int().argmax(-1)
        return last_real_position(self._read(inputs))

    def _read(self, inputs: Any) -> Any:
        """The part of the inputs after which the answer comes: an encoder-decoder's second one."""
        if self._transformer is not None and self._transformer.config.is_encoder_decoder:
            return {
                key.removeprefix("decoder_"): value
                for key, value in inputs.items()
                if key.startswith("decoder_")
            }
        return inputs


def _is_masked(transformer: PreTrainedModel) -> bool:
    name = type(transformer).__name__
    return (
        name in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()
        and name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        and not transformer.config.is_encoder_decoder
    )


def start_token(transformer: PreTrainedModel) -> int:
    """The token that an encoder-decoder's second text begins with; an error if it has none."""
    for config in (transformer.config, transformer.generation_config):
        start = getattr(config, "decoder_start_token_id", None)
        if start is not None:
            return start
    raise ValueError("The model has no decoder_start_token_id: add decoder_input_ids to the batch.")


def takes_positions(transformer: PreTrainedModel) -> bool:
    """Whether a decoder can be told the positions of its tokens."""
    return "position_ids" in _parameters(transformer)


def decoder_options(
    transformer: PreTrainedModel, inputs: Any, counts_positions: bool
) -> dict[str, Any]:
    """Keyword arguments that a decoder accepts and the batch lacks.

    They switch the cache off and, where asked, pass positions that count from the first real token.
    """
    given = inputs if isinstance(inputs, Mapping) else {}
    options: dict[str, Any] = {"use_cache": False}
    mask = given.get("attention_mask")
    if counts_positions and mask is not None and not mask[:, 0].all():
        options["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_min(0)
    accepted = _parameters(transformer)
    return {key: v for key, v in options.items() if key in accepted and key not in given}


def _parameters(transformer: PreTrainedModel) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(transformer.forward).parameters


def n_positions(inputs: Any) -> int:
    """T, positions of the texts of a batch."""
    if not isinstance(inputs, Mapping):
        return inputs.shape[1]
    given = (inputs.get(key) for key in ("input_ids", "inputs_embeds", "attention_mask"))
    return next(value.shape[1] for value in given if value is not None)


def check_positions(values: torch.Tensor, n_positions: int) -> None:
    """Refuse logits or hidden states `(B, T, ...)` at other positions than those of the texts."""
    if values.shape[1] != n_positions:
        raise ValueError(
            f"The model returns logits at {values.shape[1]} positions for texts of {n_positions}, "
            "as where images come before the text: which are a token's can't be known. Let its "
            "forward pass return those of the texts' tokens alone."
        )


def last_real_position(inputs: Any) -> torch.Tensor:
    """`(B,)` index of the last position that is not padding, whichever side is padded.

    A text without any is refused.
    """
    if not isinstance(inputs, Mapping):
        return torch.full((len(inputs),), inputs.shape[1] - 1, device=inputs.device)
    mask = inputs.get("attention_mask")
    if mask is None:
        tokens = inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"]
        return torch.full((len(tokens),), tokens.shape[1] - 1, device=tokens.device)
    if mask.ndim != 2:
        raise ValueError(
            "Pass an attention_mask of shape (texts, positions), not "
            f"{tuple(mask.shape)}: it shows where each text ends."
        )
    mask = mask.bool()
    empty = ~mask.any(-1)
    if empty.any():
        row = int(empty.int().argmax())
        raise ValueError(
            f"Row {row} has no text: its attention_mask is 0 everywhere. Leave such rows out."
        )
    return (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(-1)
