"""What a batch may be, and what it tells of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from math import prod
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from transformers import PreTrainedModel

IGNORED = -100
"""transformers' label for a token that does not count."""

_OF_TEXT = ("attention_mask", "inputs_embeds")


def part_of(inputs: Any, place: slice, n_examples: int) -> Any:
    """Take inputs of some examples; what has no row for each stays as it is."""
    if isinstance(inputs, Mapping):
        return {key: part_of(value, place, n_examples) for key, value in inputs.items()}
    has_rows = isinstance(inputs, list) or (isinstance(inputs, Tensor) and inputs.ndim)
    return inputs[place] if has_rows and len(inputs) == n_examples else inputs


def number_of_rows(x: Any) -> int | None:
    """Count the rows of a batch's tensors; None if numbers differ."""
    values = x.values() if isinstance(x, Mapping) else [x]
    lengths = {
        len(value) if value.ndim else None
        for value in values
        if isinstance(value, Tensor)
    }
    return lengths.pop() if len(lengths) == 1 else None


def number_of_tokens(batch: Any) -> int | None:
    """Count the positions of an example's tokens; None where none can be seen."""
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    return tokens.shape[1:].numel() if is_tokens(tokens) else None


def is_tokens(value: Any) -> TypeGuard[Tensor]:
    """Tell whether something is a tensor of whole numbers that has positions."""
    is_whole = isinstance(value, Tensor) and not value.is_floating_point()
    return is_whole and value.ndim > 1


def is_real(text: Mapping[str, Any]) -> Tensor:
    """Mark which of a batch's tokens are not padding."""
    mask = text.get("attention_mask")
    if mask is None:
        return torch.ones_like(text["input_ids"], dtype=torch.bool)
    return mask.bool()


def check_tokenized(batch: Any) -> None:
    """Refuse texts, and tokens that are no tensor `(B, T)`."""
    if isinstance(batch, Mapping):
        tokens = batch.get("input_ids")
        is_other = not (tokens is None or is_tokens(tokens))
    else:
        parts = batch if isinstance(batch, list | tuple) else [batch]
        is_other = any(isinstance(part, str) for part in parts)
    if is_other:
        raise TypeError(
            "Texts must be tensors (texts, tokens): pass tokenizer(texts, "
            'padding=True, return_tensors="pt"), or what a collator makes of lists.'
        )


def check_texts(inputs: Mapping[str, Any], transformer: PreTrainedModel) -> None:
    """Refuse texts without a token or a mask."""
    tokens, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if isinstance(mask, Tensor):
        is_of_tokens = tokens is not None and mask.shape == tokens.shape
        # Masks of more dimensions are of pairs of tokens.
        if mask.ndim == 2 or is_of_tokens:
            refuse_empty(mask)
        return
    if tokens is None:
        return
    if not tokens.shape[-1]:
        refuse_empty(tokens)
    if inputs.get("position_ids") is not None:  # of texts that lie in one row
        return
    padding = pad_token(transformer)
    takes_mask = "attention_mask" in signature(transformer.forward).parameters
    if padding is not None and takes_mask and (tokens[..., [0, -1]] == padding).any():
        raise ValueError(
            f"The batch has no attention_mask, but the padding token {padding} at ends "
            "of its texts: pass the tokenizer's attention_mask."
        )


def refuse_empty(mask: Tensor) -> None:
    """Refuse texts without a token, which are read in their padding.

    The mask is `(B, T)`, or `(B, K, T)` of several texts each.
    """
    if mask.numel() and mask.all():  # of most texts that come alone
        return
    is_empty = ~mask.bool().any(-1).reshape(len(mask), -1).all(1)
    if is_empty.any():
        raise ValueError(
            f"Row {int(is_empty.int().argmax())} has no text: it has no token, or its "
            "attention_mask is 0 everywhere. Leave such rows out."
        )


def text_first(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Move padding behind the texts of a batch, where no token attends to it.

    Many models would count padding in front as positions. What lies by position moves
    along with its tokens, unless the batch says which positions they have.
    """
    mask = inputs.get("attention_mask")
    text = inputs.get("input_ids")
    if text is None:
        text = inputs.get("inputs_embeds")
    if mask is None or text is None or inputs.get("position_ids") is not None:
        return inputs
    if mask.shape != text.shape[:2]:
        return inputs
    n_padding = mask.bool().int().argmax(-1, keepdim=True)
    if not n_padding.any():
        return inputs
    n_texts, n_positions = mask.shape
    # Each row is turned around: what stood in front of its text comes after it.
    steps = torch.arange(n_positions, device=mask.device)
    places = (steps + n_padding) % n_positions
    rows = torch.arange(n_texts)[:, None]

    def shifted(key: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape[:2] != mask.shape:
            return value
        # Other numbers may be features that lie in an order of their own.
        is_feature = value.is_floating_point() and key not in _OF_TEXT
        if is_feature or key.startswith("decoder_"):
            return value
        return value[rows.to(value.device), places.to(value.device)]

    return {key: shifted(key, value) for key, value in inputs.items()}


def text_config(transformer: PreTrainedModel) -> Any:
    """Return the configuration of the part that reads tokens."""
    return transformer.config.get_text_config()


def pad_token(transformer: PreTrainedModel | None) -> int | None:
    """Return the padding token in a model's configuration, if it has one."""
    if transformer is None:
        return None
    pad_token_id = getattr(text_config(transformer), "pad_token_id", None)
    return pad_token_id if isinstance(pad_token_id, int) else None


class Positions(NamedTuple):
    """Examples and positions of a batch."""

    n_examples: int  # B, also the number of rows of logits, unless these have owners
    # Rows of the model's input: B, or a multiple where an example is several sequences.
    n_rows: int
    n_tokens: int | None = None  # positions of all rows together, where known
    # `(B, n_rows / B * T)` booleans, false at padding, or of another shape, which can't
    # be applied; None where nothing is padded.
    mask: Tensor | None = None
    # Whether the batch has tokens and nothing beside them, one row or as many for each
    # example. Otherwise contents may say which rows are whose, as where texts have
    # images.
    is_text: bool = False
    # `(N,)` index of the example that each row of logits belongs to, where examples
    # have several.
    owners_of_logits: Tensor | None = None

    def logits_of(self, examples: Tensor) -> Tensor:
        """Repeat values `(..., B)` of the examples for each of their rows of logits."""
        if self.owners_of_logits is None:
            return examples
        return examples[..., self.owners_of_logits.to(examples.device)]

    def valid(self, n_positions: int) -> Tensor | None:
        """Return a layer's mask `(B, n_positions)` of real tokens.

        None where all of them are valid, as after pooling. A `NotImplementedError` if
        the batch is padded and the layer's positions are not those of the mask.
        """
        is_pooled = n_positions == self.n_rows // self.n_examples
        if self.mask is None or is_pooled:
            return None
        if self.mask.shape != (self.n_examples, n_positions):
            raise NotImplementedError(
                f"the layer sees {n_positions} positions of each example, but "
                f"attention_mask has shape {tuple(self.mask.shape)}: use "
                'kfac_approx="gradient"'
            )
        return self.mask


def positions_of(inputs: Any, n_examples: int, device: torch.device) -> Positions:
    """Describe the rows of a batch's inputs, without labels."""
    by_key: Mapping[str, Any] = {}
    if is_tokens(inputs):
        by_key = {"input_ids": inputs}
    elif isinstance(inputs, Mapping):
        by_key = inputs
    mask = by_key.get("attention_mask")
    rows = tokens_of(by_key)
    if mask is not None:
        mask = mask.to(device).bool()
    n_rows = 0 if rows is None else prod(rows.shape[:-1])
    # As of windows, of which texts have other numbers.
    if rows is None or n_rows % n_examples:
        return Positions(n_examples, n_rows=n_examples, mask=mask)
    if mask is not None and mask.shape == rows.shape:
        mask = None if mask.all() else mask.reshape(n_examples, -1)
    is_text = _is_text(by_key, n_examples)
    return Positions(n_examples, n_rows, rows.numel(), mask, is_text)


def tokens_of(inputs: Any) -> Any:
    """Return a tensor with one number a token, in the rows of a model's input, or None.

    Of what is no mapping, all of it.
    """
    if not isinstance(inputs, Mapping):
        return inputs
    if inputs.get("input_ids") is not None:
        return inputs["input_ids"]
    if inputs.get("inputs_embeds") is not None:
        return inputs["inputs_embeds"][..., 0]
    mask = inputs.get("attention_mask")
    # One of more dimensions is of pairs of tokens.
    return mask if mask is not None and mask.ndim == 2 else None


def _is_text(inputs: Mapping[str, Any], n_examples: int) -> bool:
    """Tell whether a batch has tokens, and beside them masks and the like alone."""
    for key, value in inputs.items():
        if isinstance(value, Tensor) and value.ndim > 1:
            is_feature = value.is_floating_point() and "mask" not in key
            if is_feature or len(value) not in (1, n_examples):
                return False
    return is_tokens(inputs.get("input_ids"))


def logits_of(output: Any) -> Tensor:
    """Find the logits in what a model returns; `TypeError` if there are none."""
    logits = getattr(output, "logits", output)
    if isinstance(logits, (tuple, list)) and logits:
        logits = logits[0]
    if not isinstance(logits, Tensor):
        raise TypeError(
            "The model must return logits: an output with .logits, a tensor, or a "
            f"tuple that begins with one, not {type(output).__name__}."
        )
    return logits
