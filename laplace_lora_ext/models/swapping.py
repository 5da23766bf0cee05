"""Copies texts with some tokens of other texts in them: more texts, without labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from laplace_lora_ext.models.batches import text_config

# The share of a text's tokens that are swapped.
_SWAPPED = 0.3
# Tokens in more than this share of the texts are a prompt's.
_OF_PROMPT = 0.9


class Swapping:
    """Swaps 30 % of a text's tokens for tokens that are drawn from all texts.

    Tokens that stand in more than nine tenths of the texts are the prompt's: they stay,
    as those that the model's configuration names and padding do.

    Parameters
    ----------
    batches : sequence of Mapping
        with `input_ids` `(B, T)`, and an `attention_mask` where texts are padded
    transformer : PreTrainedModel, optional
    generator : torch.Generator
        of the CPU
    """

    def __init__(
        self,
        batches: Sequence[Mapping[str, Any]],
        transformer: PreTrainedModel | None,
        generator: torch.Generator,
    ) -> None:
        texts = [
            row[is_real]
            for batch in batches
            for row, is_real in zip(
                batch["input_ids"].cpu(), _is_real(batch), strict=True
            )
        ]
        # Common tokens are drawn as often as they stand in texts, so that copies have
        # their words.
        tokens = torch.cat(texts)
        # How many texts each token of the vocabulary stands in.
        n_texts = torch.cat([text.unique() for text in texts]).bincount()
        of_prompt = (n_texts > _OF_PROMPT * len(texts)).nonzero().flatten()
        special = [] if transformer is None else _special_tokens(transformer)
        self._staying = torch.cat([of_prompt, torch.tensor(special, dtype=torch.long)])
        self._drawn_from = tokens[~torch.isin(tokens, self._staying)]
        self._generator = generator

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Copy a batch with swapped tokens."""
        ids = batch["input_ids"].cpu()
        if not len(self._drawn_from):
            return dict(batch)
        may_go = _is_real(batch) & ~torch.isin(ids, self._staying)
        # A share of each text by itself: no short text loses all of its words.
        n_swapped = (_SWAPPED * may_go.sum(-1, keepdim=True)).round()
        # The tokens with the smallest lots of their text go.
        lots = torch.rand(ids.shape, generator=self._generator)
        lots = lots.masked_fill(~may_go, torch.inf)
        places = torch.randint(
            len(self._drawn_from), ids.shape, generator=self._generator
        )
        # Where each lot stands in their order: the inverse of the permutation that
        # sorts them.
        goes = lots.argsort(-1).argsort(-1) < n_swapped
        swapped = torch.where(goes, self._drawn_from[places], ids)
        return {**batch, "input_ids": swapped.to(batch["input_ids"].device)}


def _special_tokens(transformer: PreTrainedModel) -> list[int]:
    """Find a configuration's special tokens: padding, a text's end, images."""
    settings = transformer.config.to_dict() | text_config(transformer).to_dict()
    tokens: list[int] = []
    for name, value in settings.items():
        if name.endswith(("_token_id", "_token_index")):
            several = value if isinstance(value, list) else [value]
            # Many configurations leave some of them None.
            tokens += [token for token in several if isinstance(token, int)]
    return tokens


def _is_real(batch: Mapping[str, Any]) -> Tensor:
    """Mark the tokens that are not padding, `(B, T)` on the CPU."""
    mask = batch.get("attention_mask")
    if mask is None:
        return torch.ones(batch["input_ids"].shape, dtype=torch.bool)
    return mask.cpu().bool()
