"""How much of a batch fits into memory, and what to say where nothing does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor

from laplace_lora_ext.models.batches import number_of_tokens
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.running import checkpointed_layers

Result = TypeVar("Result")


@dataclass(frozen=True)
class OutOfMemory:
    """What an accelerator said when its memory did not suffice."""

    message: str

    def of_example(
        self,
        model: LogitsModel,
        example: Any,
    ) -> torch.OutOfMemoryError:
        """Make an error that not even one example fits, with what needs less memory."""
        n_tokens = _longest(example)
        advice: list[str] = []
        if not checkpointed_layers(model.tree):
            advice.append(
                "switch on gradient checkpointing (model.gradient_checkpointing_enable)"
            )
        if n_tokens is not None:
            advice.append("cut texts shorter")
        advice.append("load the base model in 4-bit (transformers.BitsAndBytesConfig)")
        what = "One example" if n_tokens is None else f"One text of {n_tokens} tokens"
        return torch.OutOfMemoryError(
            f"{what} does not fit into the memory of {model.device}: "
            f"{', or '.join(advice)}. ({self.message})"
        )

    def of_batch(
        self,
        model: LogitsModel,
        batch: Any,
        reason: str,
    ) -> torch.OutOfMemoryError:
        """Make the error for a batch that does not fit and is not divided.

        `reason` says why it is not.
        """
        n_tokens = _longest(batch)
        of_length = (
            "" if n_tokens is None else f", the longest text of {n_tokens} tokens,"
        )
        return torch.OutOfMemoryError(
            f"The batch{of_length} does not fit into the memory of {model.device}, and "
            f"is not divided, since {reason}: pass smaller batches. ({self.message})"
        )


class Memory:
    """Remembers how many rows of a layer fit into memory, in passes of one kind."""

    def __init__(self) -> None:
        # To try; infinite as long as all that was tried did fit.
        self._most_rows = math.inf
        self.failure = OutOfMemory("")  # the last one: it has made the parts smaller

    def size(self, n_rows: int, at_most: int) -> int:
        """Say how many examples of `n_rows` rows each to try at once."""
        if math.isinf(self._most_rows):
            return at_most
        # One example is always tried: it may be shorter than those that did not fit.
        n_that_fit = max(1, int(self._most_rows) // n_rows)
        return min(at_most, n_that_fit)

    def halve(
        self,
        n_examples: int,
        n_rows: int,
        failure: OutOfMemory,
    ) -> None:
        """Remember that examples of `n_rows` rows each did not fit: half may."""
        half = max(1, n_examples // 2)
        # In rows, since later batches may have longer texts.
        self._most_rows = half * n_rows
        self.failure = failure


def attempt(evaluate: Callable[[], Result]) -> Result | OutOfMemory:
    """Evaluate, and let go of all that was made where memory does not suffice."""
    try:
        return evaluate()
    except RuntimeError as error:
        if not should_reduce_batch_size(error):
            raise
        failure = OutOfMemory(str(error))
    # Only here, where the error has gone, does nothing hold the graph that did not fit.
    clear_device_cache(garbage_collection=True)
    return failure


def _longest(batch: Any) -> int | None:
    """Count the tokens of the longest text, without padding; None without texts."""
    n_tokens = number_of_tokens(batch)
    if n_tokens is None or not isinstance(batch, Mapping):
        return n_tokens
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return n_tokens
    lengths = mask.bool().sum(1)
    return int(lengths.max())
