"""Preferences: pairs of texts in, a reward each out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from laplace_lora_ext.messages import warn
from laplace_lora_ext.models.batches import logits_of
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.tasks.classification import Classification
from laplace_lora_ext.tasks.regression import REGRESSION
from laplace_lora_ext.tasks.task import ClassCounts, Task

_KEYS = ("input_ids", "attention_mask")


class PreferenceModel(LogitsModel):
    """A model with one output that scores pairs, too, for "reward_modeling".

    A transformers sequence classifier with one label maps texts `(B, T)` to rewards
    `(B, 1)`, and pairs `(B, 2, T)` to rewards `(B, 2)`: the logits of preferring the
    first or the second, as in the Bradley-Terry model. Any other module is called with
    the batch itself, and must return such logits for both.

    Batches may come without labels, as TRL's collator makes them: B chosen texts
    followed by B rejected ones.
    """

    def split_if_labelled(self, batch: Any) -> tuple[Any, Tensor | None]:
        """Split a batch; of TRL's, make pairs whose first text is preferred."""
        if not isinstance(batch, Mapping) or batch.get(self.dict_key_y) is not None:
            return super().split_if_labelled(batch)
        pairs = self._pairs(batch)
        first = torch.zeros(
            len(pairs["input_ids"]), dtype=torch.long, device=self.device
        )
        return pairs, first

    def inputs(self, batch: Any) -> Any:
        """Return texts as they are, not as pairs: predictions are of each by itself."""
        return super().split_if_labelled(batch)[0]

    def _pairs(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return token ids and their mask, `(B, 2, T)`, of one of TRL's batches."""
        if "margin" in batch:
            warn(
                'The likelihood "reward_modeling" has no margin: the batch\'s margin '
                "is ignored."
            )
        tokens = batch.get("input_ids")
        if tokens is None or tokens.ndim != 2 or len(tokens) % 2:
            raise ValueError(
                f"No labels {self.dict_key_y!r} in the batch, and no pairs: pass as "
                "many chosen as rejected texts, all chosen ones first in input_ids."
            )
        # All chosen texts come first, then all rejected ones.
        return {
            key: batch[key].unflatten(0, (2, -1)).transpose(0, 1)
            for key in _KEYS
            if key in batch
        }

    def _call(self, inputs: Any) -> Any:
        tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
        if self.transformer is None or tokens is None or tokens.ndim < 3:
            return super()._call(inputs)
        # The classifier knows texts alone: both of a pair are given as if they were two
        # examples.
        shape = tokens.shape[:2]
        texts = {}
        for key, value in inputs.items():
            lies_by_text = isinstance(value, Tensor) and value.shape[:2] == shape
            texts[key] = value.flatten(0, 1) if lies_by_text else value
        rewards = logits_of(super()._call(texts))
        if rewards.shape != (shape.numel(), 1):
            raise ValueError(
                "A reward model has one output, but this one returns "
                f"{tuple(rewards.shape)} for {shape.numel()} texts: load it with "
                "num_labels=1."
            )
        return rewards.reshape(shape)


class Preferences(Classification):
    """Tells which of two texts is preferred, and predicts a number for each."""

    name = "reward_modeling"
    name_for_host = "reward_modeling"
    adapter = PreferenceModel

    @property
    def predicted(self) -> Task:
        return REGRESSION

    def class_counts(self, y: Tensor) -> ClassCounts:
        """Count half a pair for each order: which comes first means nothing."""
        half = len(y) / 2
        return ClassCounts({(0, 0): half, (0, 1): half})


PREFERENCES = Preferences()
