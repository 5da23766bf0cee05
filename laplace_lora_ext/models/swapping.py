"""Copies texts with some tokens of other texts in them: more texts, without labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from laplace_lora_ext.messages import check_name
from laplace_lora_ext.models.batches import is_real, text_config
from laplace_lora_ext.models.logits_model import LogitsModel

# The share of a text's tokens that are swapped.
_SWAPPED = 0.3
# Tokens in more than this share of the texts are a prompt's.
_OF_PROMPT = 0.9


def swapping(
    model: LogitsModel, name: str, loader: Iterable[Any], generator: torch.Generator
) -> Callable[[Any], Any]:
    """Return a function that copies a batch, 30 % of each text's tokens swapped.

    They are swapped for tokens that are drawn from all texts of the loader. Tokens that
    stand in more than nine tenths of these are the prompt's: they stay, as those that
    the model's configuration names and padding do. If the loader has no texts, it makes
    None. The generator is of the CPU. Another name than "swapped" is refused.
    """
    check_name("unlabelled", name, ["swapped"])
    texts: list[Tensor] = []
    for batch in loader:
        text = model.text(batch)
        if text is not None:
            rows = zip(text["input_ids"], is_real(text), strict=True)
            texts += [row[of_text].cpu() for row, of_text in rows]
    if not texts:
        return lambda batch: None
    # Common tokens are drawn as often as they stand in texts, so that copies have their
    # words.
    tokens = torch.cat(texts)
    # How many texts each token of the vocabulary stands in.
    n_texts = torch.cat([text.unique() for text in texts]).bincount()
    of_prompt = (n_texts > _OF_PROMPT * len(texts)).nonzero().flatten()
    special = [] if model.transformer is None else _special_tokens(model.transformer)
    staying = torch.cat([of_prompt, torch.tensor(special, dtype=torch.long)])
    drawn_from = tokens[~torch.isin(tokens, staying)]

    def swapped(batch: Any) -> Any:
        text = model.text(batch)
        if not len(drawn_from):
            return text
        ids = text["input_ids"].cpu()
        may_go = is_real(text).cpu() & ~torch.isin(ids, staying)
        # A share of each text by itself: no short text loses all of its words.
        n_swapped = (_SWAPPED * may_go.sum(-1, keepdim=True)).round()
        # The tokens with the smallest lots of their text go.
        lots = torch.rand(ids.shape, generator=generator)
        lots = lots.masked_fill(~may_go, torch.inf)
        places = torch.randint(len(drawn_from), ids.shape, generator=generator)
        # Where each lot stands in their order: the inverse of the permutation that
        # sorts them.
        goes = lots.argsort(-1).argsort(-1) < n_swapped
        ids = torch.where(goes, drawn_from[places], ids)
        return {**text, "input_ids": ids.to(text["input_ids"].device)}

    return swapped


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
