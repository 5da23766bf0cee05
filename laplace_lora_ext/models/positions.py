"""What a batch tells about the rows that layers see."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import torch


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
    length: int | None
    mask: torch.Tensor | None
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
    is_text = _is_text(inputs, n_examples)
    if not isinstance(inputs, Mapping):
        return Positions(n_examples, n_examples, _n_positions(inputs), None, is_text)
    mask = inputs.get("attention_mask")
    if mask is not None and mask.ndim > 1 and len(mask) == 1:  # all examples may share one
        mask = mask.expand(n_examples, *mask.shape[1:])
    if mask is not None and mask.ndim == 4:  # what each token attends to
        if mask.is_floating_point():  # added to scores: 0 there, very negative elsewhere
            mask = mask == 0
        shape = (len(mask), mask.shape[-1])
    elif mask is not None and mask.ndim >= 2:
        shape = mask.shape
    elif inputs.get("input_ids") is not None:
        mask, shape = None, inputs["input_ids"].shape
    else:
        return Positions(n_examples, n_examples, None, None, is_text)
    n_rows = prod(shape[:-1])
    if mask is not None:
        # Rows that are no examples, as windows of texts, may not be shared out equally.
        n_equal = 1 if n_rows % n_examples else n_examples
        mask = mask.to(device).bool().reshape(n_equal, -1)
        mask = None if mask.all() else mask
    lie_by_example = shape[0] == n_examples
    return Positions(n_examples, n_rows, shape[-1] if lie_by_example else None, mask, is_text)


def _n_positions(inputs: Any) -> int | None:
    """Positions of a row of tokens `(B, T)` or of features `(B, ..., d)`, where there are any."""
    if not isinstance(inputs, torch.Tensor):
        return None
    is_tokens = not inputs.is_floating_point()
    positions = inputs.shape[1:] if is_tokens else inputs.shape[1:-1]
    return prod(positions) if positions else None


def features(inputs: Any) -> frozenset[str]:
    """Keys of what a batch has beside tokens and masks, such as images."""
    return frozenset(
        key
        for key, value in _tensors(inputs).items()
        if value.is_floating_point() and "mask" not in key
    )


def _is_text(inputs: Any, n_examples: int) -> bool:
    """Whether there are tokens, and no tensor beside them but masks and the like."""
    if isinstance(inputs, torch.Tensor):
        return inputs.ndim > 1 and not inputs.is_floating_point()
    tensors = _tensors(inputs)
    lengths = {len(tensor) for tensor in tensors.values()}
    return "input_ids" in tensors and not features(inputs) and lengths <= {1, n_examples}


def _tensors(inputs: Any) -> dict[str, torch.Tensor]:
    """Tensors of a batch that is no single one, of two dimensions or more."""
    if isinstance(inputs, (tuple, list)):
        inputs = {str(place): value for place, value in enumerate(inputs)}
    items = inputs.items() if isinstance(inputs, Mapping) else ()
    return {k: v for k, v in items if isinstance(v, torch.Tensor) and v.ndim > 1}
