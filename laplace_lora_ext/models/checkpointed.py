"""Gradient checkpointing that a user has left on: transformers heeds it in training alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, repeat
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache

try:
    from transformers.modeling_layers import GradientCheckpointingLayer
except ImportError:  # before transformers 4.52, whose models do it in code of their own
    GradientCheckpointingLayer = ()


@contextmanager
def checkpointed(
    model: nn.Module, run_again: Callable[[Callable[[], object]], object]
) -> Iterator[None]:
    """Within, layers with gradient checkpointing on forget their activations in evaluation mode.

    Each backward pass computes them again, layer by layer. The layer itself stays in evaluation
    mode: no dropout.

    Parameters
    ----------
    model : torch.nn.Module
        in evaluation mode
    run_again : callable
        is given what computes a layer again, to run it
    """
    layers: Any = [m for m in model.modules() if _is_checkpointed(m)]
    functions = [layer._gradient_checkpointing_func for layer in layers]
    try:
        for layer in layers:
            layer.training = True  # transformers asks this, and then calls the function
            layer._gradient_checkpointing_func = partial(_run, layer, run_again)
        yield
    finally:
        for layer, function in zip(layers, functions, strict=True):
            layer.training = False
            layer._gradient_checkpointing_func = function


def _run(layer: nn.Module, run_again: Callable, function: Callable, *args: Any) -> Any:
    # The second computation would add to a cache what the first one has added.
    args = tuple(None if isinstance(arg, Cache) else arg for arg in args)

    def in_evaluation_mode(*args: Any) -> Any:
        layer.training = False
        try:
            return function(*args)
        finally:
            layer.training = True

    runs = chain([lambda compute: compute()], repeat(run_again))  # at first as it is

    def computed(*args: Any) -> Any:
        return next(runs)(partial(in_evaluation_mode, *args))

    return checkpoint(computed, *args, use_reentrant=False, preserve_rng_state=False)


def _is_checkpointed(module: nn.Module) -> bool:
    return isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
