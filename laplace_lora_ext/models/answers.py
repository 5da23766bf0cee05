"""Class logits of a language model: those of the answers' tokens after the last real token."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel


class AnswerTokens:
    """The tokens of a causal language model's answers, one a class.

    `transformer` is None for another kind of model that returns logits of a vocabulary.

    Raises
    ------
    ValueError
        If a token repeats or lies outside the vocabulary, or there are fewer than two.
    NotImplementedError
        For an encoder-decoder.
    """

    def __init__(self, class_token_ids: Sequence[int], transformer: PreTrainedModel | None) -> None:
        if transformer is not None and transformer.config.is_encoder_decoder:
            raise NotImplementedError("class_token_ids are for causal language models only.")
        vocabulary = getattr(getattr(transformer, "config", None), "vocab_size", None)
        ids = list(class_token_ids)
        if len(ids) < 2 or len(set(ids)) < len(ids):
            raise ValueError(f"class_token_ids must be two or more distinct tokens, not {ids}.")
        if min(ids) < 0 or (vocabulary is not None and max(ids) >= vocabulary):
            raise ValueError(f"class_token_ids {ids} are not all in the vocabulary.")
        self.ids = ids
        self._transformer = transformer

    @property
    def takes_positions(self) -> bool:
        """Whether the decoder can be told the positions of its tokens."""
        transformer = self._transformer
        return transformer is not None and "position_ids" in _parameters(transformer)

    def options(self, inputs: Any, counts_positions: bool) -> dict[str, Any]:
        """Keyword arguments that the decoder understands and the batch does not have yet.

        `counts_positions` asks for positions that count from the first real token.
        """
        if self._transformer is None:
            return {}
        accepted = _parameters(self._transformer)
        options: dict[str, Any] = {"use_cache": False}
        given = inputs if isinstance(inputs, Mapping) else {}
        mask = given.get("attention_mask")
        # Newer decoders compute logits for one position a row, older ones for the last few of all.
        if hasattr(inspect.getmodule(self._transformer.forward), "slice_logits_to_keep"):
            options["logits_to_keep"] = last_real_position(inputs)[:, None]
        elif mask is None or mask[:, -1].all():
            options["logits_to_keep"] = options["num_logits_to_keep"] = 1
        if counts_positions and mask is not None and not mask[:, 0].all():
            options["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_min(0)
        return {key: v for key, v in options.items() if key in accepted and key not in given}

    def select(self, logits: torch.Tensor, inputs: Any) -> torch.Tensor:
        """Logits `(B, T, V)` of the vocabulary to `(B, C)` of the answers.

        Raises
        ------
        ValueError
            If they have another number of dimensions.
        """
        if logits.ndim != 3:
            raise ValueError(
                "class_token_ids need logits of shape (batch, positions, vocabulary), not "
                f"{tuple(logits.shape)}."
            )
        if logits.shape[1] > 1:
            logits = logits.take_along_dim(last_real_position(inputs)[:, None, None], dim=1)
        return logits[:, 0, self.ids]


def _parameters(transformer: PreTrainedModel) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(transformer.forward).parameters


def last_real_position(inputs: Any) -> torch.Tensor:
    """`(B,)` index of the last position that is not padding, on whichever side that is."""
    if not isinstance(inputs, Mapping):
        return torch.full((len(inputs),), inputs.shape[1] - 1, device=inputs.device)
    mask = inputs.get("attention_mask")
    if mask is None:
        tokens = inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"]
        return torch.full((len(tokens),), tokens.shape[1] - 1, device=tokens.device)
    return (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(-1)
