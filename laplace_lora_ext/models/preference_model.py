"""Reward models: pairs of texts in, a reward each out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from laplace_lora_ext.models.logits_model import LogitsModel, logits_of


class PreferenceModel(LogitsModel):
    """A model with one output that also scores pairs, for the likelihood "reward_modeling".

    A transformers sequence classifier with one label maps texts `(B, T)` to rewards `(B, 1)`, and
    pairs `(B, 2, T)` to rewards `(B, 2)`: the logits of preferring the first or the second, as in
    the Bradley-Terry model. Any other module is called as it is, and must do so itself.
    """

    def _call(self, inputs: Any, **kwargs: Any) -> Any:
        tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
        if self._transformer[0] is None or tokens is None or tokens.ndim < 3:
            return super()._call(inputs, **kwargs)
        pairs = tokens.shape[:2]
        flat = {
            key: value.flatten(0, 1)
            if isinstance(value, torch.Tensor) and value.shape[:2] == pairs
            else value
            for key, value in inputs.items()
        }
        rewards = logits_of(super()._call(flat, **kwargs))
        if rewards.shape != (pairs.numel(), 1):
            raise ValueError(
                f"A reward model has one output, and this one returns {tuple(rewards.shape)} for "
                f"{pairs.numel()} texts: load it with num_labels=1."
            )
        return rewards.reshape(pairs)
