"""Copies of texts in which some tokens are those of other texts: more texts, without labels."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from transformers import PreTrainedModel

from laplace_lora_ext.models.batches import text_config

_SWAPPED = 0.3  # share of a text's tokens
_OF_PROMPT = 0.9  # share of the texts that a prompt's tokens stand in


class Swapping:
    """Swaps 30 % of a text's tokens for tokens that are drawn from all texts.

    Tokens that stand in more than nine tenths of the texts are the prompt's: they stay, as special
    tokens and padding do.

    Texts are pairs of token ids `(B, T)` and their attention mask, or None where nothing is padded.
    """

    def __init__(
        self,
        texts: Iterable[tuple[torch.Tensor, torch.Tensor | None]],
        special: Collection[int] = (),
    ) -> None:
        rows = [
            row[real]
            for input_ids, mask in texts
            for row, real in zip(input_ids.cpu(), _real(input_ids, mask), strict=True)
        ]
        tokens = torch.cat(rows)
        n_texts = torch.cat([row.unique() for row in rows]).bincount()  # by token
        of_prompt = (n_texts > _OF_PROMPT * len(rows)).nonzero().flatten()
        self._staying = torch.cat([of_prompt, torch.tensor(sorted(special), dtype=torch.long)])
        self._drawn_from = tokens[~torch.isin(tokens, self._staying)]

    def __call__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """A copy `(B, T)` of token ids with swapped tokens; `generator` is one of the CPU."""
        ids = input_ids.cpu()
        if not len(self._drawn_from):
            return input_ids.clone()
        may_go = _real(input_ids, attention_mask) & ~torch.isin(ids, self._staying)
        n_swapped = (_SWAPPED * may_go.sum(-1, keepdim=True)).round()
        lots = torch.rand(ids.shape, generator=generator).masked_fill(~may_go, torch.inf)
        places = torch.randint(len(self._drawn_from), ids.shape, generator=generator)
        goes = lots.argsort(-1).argsort(-1) < n_swapped
        return torch.where(goes, self._drawn_from[places], ids).to(input_ids.device)


def special_tokens(transformer: PreTrainedModel) -> set[int]:
    """Tokens that a configuration names, such as those of padding, of a text's end, of images."""
    named = transformer.config.to_dict() | text_config(transformer).to_dict()
    values = [v for k, v in named.items() if k.endswith(("_token_id", "_token_index"))]
    each = [x for value in values for x in (value if isinstance(value, list) else [value])]
    return {token for token in each if isinstance(token, int)}


def _real(input_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """`(B, T)` booleans on the CPU, false at padding."""
    return torch.ones(input_ids.shape, dtype=torch.bool) if mask is None else mask.cpu().bool()
