"""Prepares batches: tensors on the model's device, and a mask that tells padding from text."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from inspect import signature
from typing import Any

import numpy as np
import torch
import tqdm
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from laplace_lora_ext.messages import warn
from laplace_lora_ext.models.locks import as_tensor
from laplace_lora_ext.processes.exchange import rank

_OF_TEXTS = ("input_ids", "attention_mask")
_PACKED = ("cu_seq_lens_q", "cu_seqlens", "cu_seq_lens", "seq_idx")
_LOGITS_TO_KEEP = ("logits_to_keep", "num_logits_to_keep")


def named_batches(
    loader: Iterable[Any], description: str = "", progress_bar: bool = False
) -> Iterator[tuple[str, Any]]:
    """Each batch that is not empty, with its name for error messages."""
    hidden = not progress_bar or rank() > 0
    batches = tqdm.tqdm(loader, desc=description, disable=hidden)
    for index, batch in enumerate(batches):
        if not _is_empty(batch):
            yield f"batch {index}", batch


def moved(batch: Mapping[str, Any], device: torch.device, *left_out: str) -> Any:
    """A copy of a batch on a device, of the same type where it can be, without some of its keys."""
    # A shallow copy of another kind of mapping might share its contents with the user's, and a
    # ModelOutput lets go of no key.
    copied = isinstance(batch, (dict, UserDict)) and not isinstance(batch, ModelOutput)
    inputs: Any = copy.copy(batch) if copied else dict(batch)
    for key in left_out:
        if key in inputs:
            del inputs[key]
    for key, value in inputs.items():
        if isinstance(value, torch.Tensor):
            inputs[key] = value.to(device)
    return inputs


def examples_of(inputs: Any, n_examples: int) -> list[Any]:
    """One batch for each example; tensors with another number of rows go into all of them.

    The list is empty if the inputs are neither a tensor nor a mapping.
    """
    if isinstance(inputs, torch.Tensor):
        return list(inputs.split(1))
    if not isinstance(inputs, Mapping):
        return []
    examples = []
    for n in range(n_examples):
        example = copy.copy(inputs) if isinstance(inputs, (dict, UserDict)) else dict(inputs)
        for key, value in inputs.items():
            if isinstance(value, torch.Tensor) and value.ndim and len(value) == n_examples:
                example[key] = value[n : n + 1]
        examples.append(example)
    return examples


def number_of_rows(x: Any) -> int | None:
    """Of all tensors of a batch; None where they have none, or unequal numbers of them."""
    values = x.values() if isinstance(x, Mapping) else [x]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    lengths = {len(tensor) if tensor.ndim else None for tensor in tensors}
    return lengths.pop() if len(lengths) == 1 else None


def complete(inputs: Any, transformer: PreTrainedModel, device: torch.device) -> None:
    """Turn lists and arrays of a transformers batch into tensors, and add a missing mask.

    Raises
    ------
    ValueError
        If the batch asks for logits of certain positions, its texts have no tokens, or its padding
        can't be told from text.
    NotImplementedError
        If several texts are packed into a row.
    """
    for key, value in inputs.items():
        if isinstance(value, np.ndarray) or _is_nested_numbers(value):
            inputs[key] = as_tensor(_array(key, value)).to(device)
    for key in _OF_TEXTS:
        _check_rows(key, inputs.get(key))
    _check_meaning(inputs)
    tokens, padding = inputs.get("input_ids"), pad_token(transformer)
    if tokens is not None and not tokens.shape[-1]:
        raise ValueError(
            f"The batch's texts have no tokens: input_ids has shape {tuple(tokens.shape)}."
        )
    accepts_mask = "attention_mask" in signature(transformer.forward).parameters
    if tokens is None or padding is None or not accepts_mask:
        return
    if inputs.get("attention_mask") is None and (mask := find_padding(tokens, padding)) is not None:
        inputs["attention_mask"] = mask


def find_padding(input_ids: torch.Tensor, pad_token_id: int) -> torch.Tensor | None:
    """An attention mask for token ids `(..., T)` that came without one; None without padding.

    The first and last tokens of the rows show whether there is padding. If there is, this warns,
    and refuses a batch whose texts also have the padding token inside.
    """
    is_text = input_ids != pad_token_id
    if is_text[..., 0].all() and is_text[..., -1].all():
        return None
    begins = (is_text[..., 1:] & ~is_text[..., :-1]).sum(-1) + is_text[..., 0]
    if (begins > 1).any():
        raise ValueError(
            f"The batch has no attention_mask, and its padding can't be told from text: token "
            f"{pad_token_id} also occurs within a row. Pass the tokenizer's attention_mask."
        )
    warn(
        f"The batch has no attention_mask: tokens {pad_token_id} at the ends of its rows are taken "
        "for padding. Pass the tokenizer's attention_mask."
    )
    return is_text.long()


def text_config(transformer: PreTrainedModel) -> Any:
    """The configuration of the part that reads tokens."""
    config = transformer.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def pad_token(transformer: PreTrainedModel | None) -> int | None:
    """The padding token in a model's configuration, if it has one."""
    config = None if transformer is None else text_config(transformer)
    pad_token_id = getattr(config, "pad_token_id", None)
    return pad_token_id if isinstance(pad_token_id, int) else None


def _array(key: str, value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError as error:  # lists of unequal lengths
        raise ValueError(
            f"The rows of {key} are not equally long: pad them, as the tokenizer's pad does."
        ) from error


def _check_rows(key: str, value: Any) -> None:
    """Refuse tokens or a mask in a form that no model reads, and name it."""
    form = None
    if isinstance(value, (list, tuple)):
        form = f"a {type(value).__name__} of {type(value[0]).__name__}" if value else "empty"
    elif isinstance(value, torch.Tensor):
        if value.is_nested or value.layout != torch.strided:
            form = "a nested tensor" if value.is_nested else f"of layout {value.layout}"
        elif value.ndim < 2:
            form = f"of shape {tuple(value.shape)}"
    if form is not None:
        raise ValueError(f"{key} must be a dense tensor (texts, positions), not {form}.")


def _check_meaning(inputs: Mapping[str, Any]) -> None:
    for key in _LOGITS_TO_KEEP:
        if inputs.get(key) is not None:
            raise ValueError(f"Leave {key} out of the batch: the library chooses positions itself.")
    packed = [key for key in _PACKED if inputs.get(key) is not None]
    if packed or _restarts(inputs.get("position_ids"), inputs.get("attention_mask")):
        raise NotImplementedError(
            f"Several texts are packed into one row, as {packed[0] if packed else 'position_ids'} "
            "shows: give each text a row of its own."
        )


def _is_empty(batch: Any) -> bool:
    if isinstance(batch, Mapping):
        sizes = [len(v) for v in batch.values() if isinstance(v, torch.Tensor) and v.ndim]
        return bool(sizes) and not any(sizes)
    first = batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 2 else batch
    if isinstance(first, Mapping):
        return _is_empty(first)
    return isinstance(first, torch.Tensor) and first.ndim > 0 and not len(first)


def _is_nested_numbers(value: Any) -> bool:
    """Whether a value is a list of numbers, or of such lists."""
    if not isinstance(value, (list, tuple)):
        return False
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return isinstance(value, (bool, int, float))


def _restarts(position_ids: Any, mask: Any) -> bool:
    """Whether positions fall within a row, as they do where another text begins."""
    if not isinstance(position_ids, torch.Tensor) or position_ids.ndim != 2:
        return False
    falls = position_ids[:, 1:] < position_ids[:, :-1]
    if isinstance(mask, torch.Tensor) and mask.shape == position_ids.shape:
        falls = falls & mask[:, 1:].bool() & mask[:, :-1].bool()
    return bool(falls.any())
