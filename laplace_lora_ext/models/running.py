"""Run models in passes of our own, in turn.

Layers that the user's training checkpoints are checkpointed here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from threading import Condition, get_ident
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from laplace_lora_ext.models.tree import Tree

# What layers call the cache of keys and values, which a second pass would extend a
# second time.
_CACHES = {"past_key_values", "past_key_value", "layer_past", "cache"}

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _OnDevice(Protocol):
    @property
    def _device(self) -> torch.device: ...


Self = TypeVar("Self", bound=_OnDevice)


class Turns:
    """Lets one thread at a time change models, or several run one that nobody changes.

    A thread that has its turn may take it again.
    """

    def __init__(self) -> None:
        self._left = Condition()
        # How often each thread that is within has entered, by its number.
        self._within: dict[int, int] = {}
        self._shared: object | None = None  # the model that all of them run
        self._undoing = ExitStack()
        self._n_waiting = 0  # for a turn of their own: nobody joins others before them

    def is_mine(self) -> bool:
        """Tell whether this thread has its turn."""
        return get_ident() in self._within

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other thread is within, and keep them out."""
        with self._left:
            if not self.is_mine():
                self._n_waiting += 1
                self._left.wait_for(lambda: not self._within)
                self._n_waiting -= 1
            self._within[get_ident()] = self._within.get(get_ident(), 0) + 1
        with self._leaving():
            yield

    @contextmanager
    def together(
        self,
        model: object,
        prepare: Callable[[], AbstractContextManager[None]],
        is_prepared: Callable[[], bool],
    ) -> Iterator[None]:
        """Run a model beside other threads that run it; the first prepares it for all.

        What that changed is undone when the last one leaves.
        """

        def may_enter() -> bool:
            if not self._within:
                return True
            return self._shared is model and not self._n_waiting and is_prepared()

        with self._left:
            self._left.wait_for(may_enter)
            if not self._within:
                self._undoing.enter_context(prepare())
                self._shared = model
            self._within[get_ident()] = self._within.get(get_ident(), 0) + 1
        with self._leaving():
            yield

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self._left:
                times = self._within.pop(get_ident())
                if times > 1:
                    self._within[get_ident()] = times - 1
                try:
                    if not self._within:
                        self._shared = None
                        self._undoing.close()
                finally:
                    self._left.notify_all()


# One for all models, since a model may hold another one.
TURNS = Turns()


@contextmanager
def alone() -> Iterator[None]:
    """Make other threads wait, and tensors without a device on the CPU."""
    with TURNS.alone(), cpu_as_default():
        yield


def exclusive(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let a method run `alone`."""
    return alone()(method)


def without_autocast(
    method: Callable[Concatenate[Self, Arguments], Result],
) -> Callable[Concatenate[Self, Arguments], Result]:
    """Shield a method of an object with a `_device` from `torch.autocast`."""

    @wraps(method)
    def wrapped(
        self: Self, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        with torch.autocast(self._device.type, enabled=False):
            return method(self, *args, **kwargs)

    return wrapped


@contextmanager
def cpu_as_default() -> Iterator[None]:
    """Make tensors without a device on the CPU, whatever `set_default_device` says."""
    if torch.get_default_device().type == "cpu":
        yield  # a context would slow every call of torch for nothing
    else:
        with torch.device("cpu"):
            yield


def as_tensor(value: Any) -> Tensor:
    """Take a tensor where it is, and make one on the CPU of other numbers.

    Within `cpu_as_default`, `torch.as_tensor` would move tensors from an accelerator to
    the CPU.
    """
    return value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")


def copy_if_inference(value: Any) -> Any:
    """Copy a tensor of inference mode, to keep it: nothing could change it later."""
    if isinstance(value, Tensor) and value.is_inference():
        return value.clone()
    return value


def is_shared(model: nn.Module) -> bool:
    """Tell whether ranks share a model's weights, and must make the same passes."""
    return any(hasattr(weight, "full_tensor") for weight in model.parameters())


# --- checkpoints ----------------------------------------------------------------------


@contextmanager
def checkpointing(tree: Tree) -> Iterator[None]:
    """Checkpoint the layers of a model that its training checkpoints, within.

    They keep their inputs alone, and the rest is computed anew backwards. transformers
    does so in training mode alone, where dropout and whatever else a layer does in
    training would change the logits. Here the layers stay in evaluation mode, and the
    model's own choice of `use_reentrant` does not matter.
    """
    layers = [each for each in tree.checkpointable if each.gradient_checkpointing]
    # Others, such as accelerate, may have put a function of their own in its place.
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = partial(_checkpointed, layer, layer.forward)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def _checkpointed(
    layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    # Nothing is kept for a backward pass, and the cache may stay.
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # transformers marks layers that only read what others have cached.
    if not getattr(layer, "_can_checkpoint_with_cache", False):
        kwargs |= dict.fromkeys(_CACHES & kwargs.keys())
    if "use_cache" in kwargs:
        kwargs["use_cache"] = False
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
