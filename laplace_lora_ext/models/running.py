"""Whose turn it is to run a model, and what a pass of ours shields from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from threading import Condition, get_ident
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

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
        self._left = Condition()  # whoever is alone holds its lock
        self._within: set[int] = set()  # threads that run one model together
        self._shared: object | None = None  # that model
        self._undoing = ExitStack()
        self._n_waiting = 0  # for a turn of their own: nobody joins others before them

    def is_shared(self) -> bool:
        """Tell whether this thread runs a model together with others."""
        return get_ident() in self._within

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other thread is within, and keep them out."""
        with self._left:
            if not self.is_shared():
                self._n_waiting += 1
                self._left.wait_for(lambda: not self._within)
                self._n_waiting -= 1
            yield

    @contextmanager
    def together(
        self, model: object, prepare: Callable[[], AbstractContextManager[None]]
    ) -> Iterator[None]:
        """Run a model beside other threads that run it; the first prepares it for all.

        What that changed is undone when the last one leaves.
        """

        def may_enter() -> bool:
            is_same = self._shared is model and not self._n_waiting
            return is_same or not self._within

        with self._left:
            self._left.wait_for(may_enter)
            if not self._within:
                self._undoing.enter_context(prepare())
                self._shared = model
            self._within.add(get_ident())
        try:
            yield
        finally:
            with self._left:
                self._within.remove(get_ident())
                self._left.notify_all()
                if not self._within:
                    self._shared = None
                    self._undoing.close()


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
