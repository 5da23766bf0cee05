"""What a batch may be, what it tells of its rows, and how models read left padding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import signature
from math import prod
from typing import Any, NamedTuple

import torch
import tqdm
from transformers import BatchEncoding, PreTrainedModel

from laplace_lora_ext.messages import warn
from laplace_lora_ext.processes.exchange import rank

_PACKED = ("cu_seq_lens_q", "cu_seqlens", "cu_seq_lens", "seq_idx")

# How far rounding may move logits, relative to the largest: in half precision, and in others.
_ROUNDING_OF_HALF, _ROUNDING = 0.05, 1e-3

# What models raise on a batch that was made of another one.
_REFUSALS = (RuntimeError, ValueError, TypeError, LookupError, AssertionError)

Predict = Callable[[Mapping[str, Any], bool], torch.Tensor]
"""Logits `(B, C)` of inputs; True passes positions that count from the first real token."""


def named_batches(
    loader: Iterable[Any], description: str = "", progress_bar: bool = False
) -> Iterator[tuple[str, Any]]:
    """Each batch that is not empty, with its name for error messages."""
    hidden = not progress_bar or rank() > 0
    for index, batch in enumerate(tqdm.tqdm(loader, desc=description, disable=hidden)):
        is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
        if number_of_rows(batch[0] if is_pair else batch) != 0:
            yield f"batch {index}", batch


def moved(batch: Mapping[str, Any], device: torch.device, *left_out: str) -> Any:
    """A copy of a batch on a device without some of its keys, a dictionary or a BatchEncoding."""
    inputs: Any = copy.copy(batch) if isinstance(batch, BatchEncoding) else dict(batch)
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
        example: Any = copy.copy(inputs)
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


def check_texts(inputs: Mapping[str, Any], transformer: PreTrainedModel) -> None:
    """Refuse batches whose texts a transformers model would read in another way than meant.

    Raises
    ------
    ValueError
        If tokens or their mask are no dense tensors of texts and positions, there is padding
        without a mask, or the batch says which logits to keep.
    NotImplementedError
        If several texts are packed into a row.
    """
    if inputs.get("logits_to_keep") is not None:
        raise ValueError("Leave logits_to_keep out of the batch: answers are read by their mask.")
    tokens, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    for key, value in (("input_ids", tokens), ("attention_mask", mask)):
        if value is not None and not _is_dense(value):
            raise ValueError(
                f"{key} must be a dense tensor of shape (texts, positions), such as the "
                'tokenizer\'s pad makes with return_tensors="pt".'
            )
    packed = [key for key in _PACKED if inputs.get(key) is not None]
    if packed or _restarts(inputs.get("position_ids"), mask):
        raise NotImplementedError(
            f"Several texts are packed into one row, as {packed[0] if packed else 'position_ids'} "
            "shows: give each text a row of its own."
        )
    if tokens is None or mask is not None:
        return
    takes_mask = "attention_mask" in signature(transformer.forward).parameters
    padding = pad_token(transformer) if takes_mask else None
    if padding is not None and (tokens[..., [0, -1]] == padding).any():
        raise ValueError(
            f"The batch has no attention_mask, but the padding token {padding} at ends of its "
            "texts: pass the tokenizer's attention_mask."
        )


def text_config(transformer: PreTrainedModel) -> Any:
    """The configuration of the part that reads tokens."""
    config = transformer.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def pad_token(transformer: PreTrainedModel | None) -> int | None:
    """The padding token in a model's configuration, if it has one."""
    config = None if transformer is None else text_config(transformer)
    pad_token_id = getattr(config, "pad_token_id", None)
    return pad_token_id if isinstance(pad_token_id, int) else None


class Positions(NamedTuple):
    """Examples and positions of a batch.

    Attributes
    ----------
    n_examples : int
        B, also the number of rows of logits unless `owners_of_logits` says otherwise
    n_rows : int
        rows of the model's input: B, or a multiple where an example is several sequences
    length : int or None
        T, positions of a row, where known; None where the rows are not those of examples
    mask : torch.Tensor or None
        `(B, n_rows / B * T)` booleans, false at padding; None where nothing is padded
    is_text : bool
        whether the batch has tokens and nothing beside them, one row or as many for each example;
        otherwise contents may say which rows belong to which example, as where texts have images
    owners_of_logits : torch.Tensor or None
        `(N,)` index of the example that each row of logits belongs to, where examples have several
    """

    n_examples: int
    n_rows: int
    length: int | None = None
    mask: torch.Tensor | None = None
    is_text: bool = False
    owners_of_logits: torch.Tensor | None = None

    def logits_of(self, examples: torch.Tensor) -> torch.Tensor:
        """Values `(..., B)` of the examples, repeated for each of their rows of logits."""
        owners = self.owners_of_logits
        return examples if owners is None else examples[..., owners.to(examples.device)]

    @property
    def n_tokens(self) -> int | None:
        """Positions of all rows together, where known."""
        return None if self.length is None else self.n_rows * self.length

    def valid(self, n_positions: int) -> torch.Tensor | None:
        """`(B, n_positions)` mask for a layer that sees so many positions of each example.

        None where all of them are valid, as after pooling. A `NotImplementedError` if the batch is
        padded and the layer's positions are not those of the mask.
        """
        pooled = n_positions == self.n_rows // self.n_examples
        if self.mask is None or pooled:
            return None
        if n_positions != self.mask.shape[1]:
            raise NotImplementedError(
                f"it sees {n_positions} positions of each example, but the attention_mask has "
                f'{self.mask.shape[1]}: use kfac_approx="gradient", which needs no mask'
            )
        return self.mask


def positions_of(inputs: Any, n_examples: int, device: torch.device) -> Positions:
    """Sizes and mask of a batch's inputs, without labels."""
    unknown = Positions(n_examples, n_examples)
    if isinstance(inputs, torch.Tensor):  # tokens `(B, T)`, or features `(B, ..., d)`
        is_text = inputs.ndim > 1 and not inputs.is_floating_point()
        sizes = inputs.shape[1:] if is_text else inputs.shape[1:-1]
        return unknown._replace(length=prod(sizes) if sizes else None, is_text=is_text)
    if not isinstance(inputs, Mapping):
        return unknown
    mask, tokens = inputs.get("attention_mask"), inputs.get("input_ids")
    if mask is not None and mask.ndim > 1 and len(mask) == 1:  # all examples may share one
        mask = mask.expand(n_examples, *mask.shape[1:])
    if mask is not None and mask.ndim == 4:  # what each token attends to
        if mask.is_floating_point():  # added to scores: 0 there, very negative elsewhere
            mask = mask == 0
        shape = (len(mask), mask.shape[-1])
    elif mask is not None and mask.ndim >= 2:
        shape = mask.shape
    elif tokens is not None:
        mask, shape = None, tokens.shape
    else:
        return unknown
    n_rows = prod(shape[:-1])
    if mask is not None:
        # Rows that are no examples, as windows of texts, may not be shared out equally.
        n_equal = 1 if n_rows % n_examples else n_examples
        mask = mask.to(device).bool().reshape(n_equal, -1)
        mask = None if mask.all() else mask
    length = shape[-1] if shape[0] == n_examples else None
    return Positions(n_examples, n_rows, length, mask, _is_text(inputs, n_examples))


def _is_text(inputs: Mapping[str, Any], n_examples: int) -> bool:
    """Whether there are tokens, and no tensor beside them but masks and the like."""
    tensors = [v for v in inputs.values() if isinstance(v, torch.Tensor) and v.ndim > 1]
    has_tokens = any(value is inputs.get("input_ids") for value in tensors)
    return has_tokens and not _features(inputs) and {len(v) for v in tensors} <= {1, n_examples}


def _features(inputs: Mapping[str, Any]) -> frozenset[str]:
    """Keys of what a batch has beside tokens and masks, such as images."""
    return frozenset(
        key
        for key, value in inputs.items()
        if isinstance(value, torch.Tensor) and value.ndim > 1
        if value.is_floating_point() and "mask" not in key
    )


# --- left padding --------------------------------------------------------------------------------


def rounding_of(logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How far two computations of the same logits may differ in a precision."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    return (_ROUNDING_OF_HALF if is_half else _ROUNDING) * logits.abs().max()


class LeftPadding:
    """Whether to pass positions, so that left padding does not change predictions.

    Many models with learned positions also count the padding. Others count from the first real
    token by themselves, from the padding's index, or in three dimensions. The first left-padded
    batch decides: one of its texts is predicted alone, padded, and padded with positions that count
    from its first token. They are passed from then on if they bring the text clearly nearer to its
    prediction alone; else the model keeps its own numbers. Batches with images or other features
    decide for themselves, since these may have positions of their own, and as a whole, since
    images need not lie by text.

    Parameters
    ----------
    can_pass : bool
        whether the model takes positions, and may be given them
    """

    def __init__(self, can_pass: bool) -> None:
        self._can_pass = can_pass
        self._verdicts: dict[frozenset[str], bool] = {}

    def passes(self, inputs: Any, predict: Predict) -> bool:
        """Whether positions are to be passed with a batch, which may be the first to decide.

        Warns
        -----
        UserWarning
            If a text's prediction depends on its padding anyway, or can't be checked.
        """
        mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
        if mask is None or mask.ndim != 2 or "position_ids" in inputs:
            return False
        beside = _features(inputs)
        if beside in self._verdicts or not _padding(mask).any():
            return self._verdicts.get(beside, False)
        alone, padded, row = (_with_more if beside else _of_one_text)(inputs)
        verdict = self._try(alone, padded, row, predict)
        # A text of one token attends to nothing but itself, so that it can't rule them out.
        if verdict or alone["attention_mask"][row].sum() > 1:
            self._verdicts[beside] = verdict
        return verdict

    def _try(
        self, alone: Mapping[str, Any], padded: Mapping[str, Any], row: int, predict: Predict
    ) -> bool:
        ways = (False, True) if self._can_pass else (False,)
        try:
            expected = predict(alone, False)[row]
            errors = [(predict(padded, passed)[row] - expected).abs().max() for passed in ways]
        except _REFUSALS as error:
            warn(
                "Can't check whether left padding changes the model's predictions "
                f"({type(error).__name__}: {error}). Pad on the right to be sure."
            )
            return False
        if min(errors) > rounding_of(expected, expected.dtype):
            warn(
                "The model's predictions depend on left padding, which changes a text's logits by "
                f"{min(errors).item():.3g}. Pad on the right."
            )
        return bool(errors[-1] < errors[0] / 2)


def _padding(mask: torch.Tensor) -> torch.Tensor:
    """`(B,)` positions before the first token of each text."""
    return mask.bool().int().argmax(-1)


def _of_one_text(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], int]:
    """A text alone and padded, and its row there."""
    mask = inputs["attention_mask"].bool()
    # The one with the most padding; of one token only, which attends to none, if there is no other.
    has_several = mask.sum(-1) > 1
    row = int((_padding(mask) * (1 + has_several * mask.shape[1])).argmax())
    first = int(_padding(mask)[row])
    padded = {
        key: value[row : row + 1]
        if isinstance(value, torch.Tensor) and value.ndim and len(value) == len(mask)
        else value
        for key, value in inputs.items()
    }
    alone = {
        key: value[:, first:] if _lies_by_position(key, inputs[key], mask) else value
        for key, value in padded.items()
    }
    return alone, padded, 0


def _with_more(inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any], int]:
    """A batch as it is and with as much padding again, and the row of its longest text."""
    mask = inputs["attention_mask"].bool()
    row, n_more = int(_padding(mask).argmax()), int(_padding(mask).max())
    padded = dict(inputs)
    for key, value in inputs.items():
        if _lies_by_position(key, value, mask):
            # What lies at the first position of the text with the most padding is padding.
            more = value[row, :1].expand(len(value), n_more, *value.shape[2:])
            padded[key] = torch.cat([more, value], dim=1)
    return inputs, padded, int(_padding(mask).argmin())


def _lies_by_position(key: str, value: Any, mask: torch.Tensor) -> bool:
    is_like_mask = isinstance(value, torch.Tensor) and value.shape[:2] == mask.shape
    return is_like_mask and not key.startswith("decoder_")


def _is_dense(value: Any) -> bool:
    is_dense = isinstance(value, torch.Tensor) and value.layout == torch.strided
    return is_dense and not value.is_nested and value.ndim > 1 and value.shape[-1] > 0


def _restarts(position_ids: Any, mask: torch.Tensor | None) -> bool:
    """Whether positions fall within a row, as they do where another text begins."""
    if not isinstance(position_ids, torch.Tensor) or position_ids.ndim != 2:
        return False
    falls = position_ids[:, 1:] < position_ids[:, :-1]
    if mask is not None and mask.shape == position_ids.shape:
        falls = falls & mask[:, 1:].bool() & mask[:, :-1].bool()
    return bool(falls.any())
