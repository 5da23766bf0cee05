"""Checkpoints, in passes of our own, the layers that the user's training checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

try:
    from transformers.modeling_layers import GradientCheckpointingLayer
except ImportError:  # older transformers checkpoint within their models' own code
    GradientCheckpointingLayer = None

# What layers call the cache of keys and values, which a second pass would extend a second time.
_CACHES = {"past_key_values", "past_key_value", "layer_past", "cache"}


def checkpointed_layers(model: nn.Module) -> list[nn.Module]:
    """Find the layers whose activations the user's training computes anew."""
    if GradientCheckpointingLayer is None:
        return []
    return [
        module
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
    ]


class Checkpoints:
    """Lets layers keep their inputs alone for backward passes, which compute the rest anew."""

    def __init__(self) -> None:
        self._n_open = 0

    @property
    def is_within(self) -> bool:
        """Say whether such a layer is being called."""
        return self._n_open > 0

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Checkpoint, within, the layers of a model that its training checkpoints.

        transformers does so in training mode alone, where dropout and whatever else a layer does in
        training would change the logits. Here the layers stay in evaluation mode, and the model's
        own choice of `use_reentrant` does not matter.
        """
        layers = checkpointed_layers(model)
        before = [vars(layer).get("forward") for layer in layers]
        for layer in layers:
            layer.forward = partial(self._checkpointed, layer, layer.forward)
        try:
            yield
        finally:
            for layer, forward in zip(layers, before, strict=True):
                if forward is None:
                    del layer.forward
                else:  # as accelerate leaves it, where it moves weights
                    layer.forward = forward

    def _checkpointed(
        self,
        layer: nn.Module,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # Nothing is kept for a backward pass, and the cache may stay.
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # transformers marks layers that only read what others have cached.
        if not getattr(layer, "_can_checkpoint_with_cache", False):
            kwargs |= dict.fromkeys(_CACHES & kwargs.keys())
        if "use_cache" in kwargs:
            kwargs["use_cache"] = False
        # A count, since checkpointed layers may lie within others.
        self._n_open += 1
        try:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        finally:
            self._n_open -= 1
