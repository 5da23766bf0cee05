"""Batches in parts that fit into memory, found as accelerate finds batch sizes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from laplace_lora_ext.models.batches import number_of_tokens, part_of
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.running import is_shared


class Memory:
    """Remembers how many rows of a model's layers fit, in passes of one kind."""

    def __init__(self, model: LogitsModel) -> None:
        self._model = model
        self._most_rows = sys.maxsize

    def parts(
        self,
        batch: Any,
        n_examples: int,
        rows_of_example: int,
        at_most: int,
        evaluate: Callable[[Any, slice], Any],
    ) -> Iterator[tuple[slice, Any]]:
        """Evaluate a batch in parts of `at_most` examples, or fewer if these don't fit.

        A `torch.OutOfMemoryError` says what to do where one example does not fit.
        """
        first = 0
        while first < n_examples:
            n_left = n_examples - first
            n_that_fit = max(1, self._most_rows // rows_of_example)
            n_parts = math.ceil(n_left / min(at_most, n_that_fit))
            size = math.ceil(n_left / n_parts)  # all parts are about as large
            place = slice(first, first + size)
            part = batch if size == n_examples else part_of(batch, place, n_examples)
            try:
                result = evaluate(part, place)
            except RuntimeError as error:
                if not should_reduce_batch_size(error):
                    raise
                # Ranks that share a model must make the same passes.
                if size == 1 or is_shared(self._model):
                    raise _too_large(self._model, part, size, error) from error
            else:
                yield place, result
                first = place.stop
                continue
            # Only here, where the error has gone, does nothing hold what did not fit.
            clear_device_cache(garbage_collection=True)
            self._most_rows = size // 2 * rows_of_example


def _too_large(
    model: LogitsModel, part: Any, size: int, error: RuntimeError
) -> torch.OutOfMemoryError:
    what = "One example" if size == 1 else f"A batch of {size} examples"
    n_tokens = number_of_tokens(part)
    of_length = "" if n_tokens is None else f" of {n_tokens} tokens"
    return torch.OutOfMemoryError(
        f"{what}{of_length} does not fit into the memory of {model.device}: cut texts "
        "shorter, switch on gradient checkpointing (model.gradient_checkpointing_"
        "enable), or load the base model in 4-bit (transformers.BitsAndBytesConfig). "
        f"({error})"
    )
