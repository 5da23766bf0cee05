"""Copies of texts in which some tokens are those of other texts: more texts, without labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from laplace_lora_ext.models.batches import text_config

_SWAPPED = 0.3  # share of a text's tokens
_OF_PROMPT = 0.9  # share of the texts that a prompt's tokens stand in


class Swapping:
    """Swaps 30 % of a text's tokens for tokens that are drawn from all texts.

    Tokens that stand in more than nine tenths of the texts are the prompt's: they stay, as those
    that the model's configuration names and padding do.

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
        rows = [
            row[real]
            for batch in batches
            for row, real in zip(batch["input_ids"].cpu(), _real(batch), strict=True)
        ]
        tokens = torch.cat(rows)
        n_texts = torch.cat([row.unique() for row in rows]).bincount()  # by token
        of_prompt = (n_texts > _OF_PROMPT * len(rows)).nonzero().flatten()
        special = [] if transformer is None else sorted(_special_tokens(transformer))
        self._staying = torch.cat([of_prompt, torch.tensor(special, dtype=torch.long)])
        self._drawn_from = tokens[~torch.isin(tokens, self._staying)]
        self._generator = generator

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of a batch with swapped tokens."""
        ids = batch["input_ids"].cpu()
        if not len(self._drawn_from):
            return dict(batch)
        may_go = _real(batch) & ~torch.isin(ids, self._staying)
        n_swapped = (_SWAPPED * may_go.sum(-1, keepdim=True)).round()
        lots = torch.rand(ids.shape, generator=self._generator).masked_fill(~may_go, torch.inf)
        places = torch.randint(len(self._drawn_from), ids.shape, generator=self._generator)
        goes = lots.argsort(-1).argsort(-1) < n_swapped
        swapped = torch.where(goes, self._drawn_from[places], ids)
        return {**batch, "input_ids": swapped.to(batch["input_ids"].device)}


def _special_tokens(transformer: PreTrainedModel) -> set[int]:
    """Tokens that a configuration names, such as those of padding, of a text's end, of images."""
    named = transformer.config.to_dict() | text_config(transformer).to_dict()
    values = [v for k, v in named.items() if k.endswith(("_token_id", "_token_index"))]
    each = [x for value in values for x in (value if isinstance(value, list) else [value])]
    return {token for token in each if isinstance(token, int)}


def _real(batch: Mapping[str, Any]) -> torch.Tensor:
    """`(B, T)` booleans on the CPU, false at padding."""
    mask = batch.get("attention_mask")
    return torch.ones(batch["input_ids"].shape).bool() if mask is None else mask.cpu().bool()
