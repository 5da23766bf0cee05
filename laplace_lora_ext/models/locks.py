"""One thread at a time runs a model: eagerly, and with the CPU as the default device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from threading import Lock, RLock
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

Method = TypeVar("Method", bound=Callable[..., Any])

# Beside the models and not in them: a lock can be neither copied nor pickled.
_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_GUARD = Lock()
_USERS_DEVICE: ContextVar[torch.device | None] = ContextVar("users device", default=None)


def lock_of(model: nn.Module) -> Any:
    """The lock of a model; the thread that holds it may take it again."""
    with _GUARD:
        return _LOCKS.setdefault(model, RLock())


def exclusive(method: Method) -> Method:
    """Make other threads wait for the model while a method of a Laplace approximation runs.

    It also sets aside a default device other than the CPU.
    """

    @wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.model.lock, cpu_as_default():
            return method(self, *args, **kwargs)

    return wrapped  # pyright: ignore[reportReturnType]


@contextmanager
def cpu_as_default() -> Iterator[None]:
    """Within, tensors without a device are made on the CPU, whatever `set_default_device` says."""
    get = getattr(torch, "get_default_device", None)  # before PyTorch 2.3 nothing tells
    device = get() if get else torch.device("cpu")
    if device.type == "cpu":
        yield
        return
    token = _USERS_DEVICE.set(device)
    try:
        with torch.device("cpu"):
            yield
    finally:
        _USERS_DEVICE.reset(token)


def users_default() -> AbstractContextManager[object]:
    """For the user's own code within: the default device as it was."""
    device = _USERS_DEVICE.get()
    return nullcontext() if device is None else device


def as_tensor(value: Any) -> torch.Tensor:
    """A tensor where it is, and other numbers as one on the CPU.

    Within `cpu_as_default`, `torch.as_tensor` would move tensors from an accelerator to the CPU.
    """
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")


@contextmanager
def running_eagerly(model: nn.Module) -> Iterator[None]:
    """Within, compiled modules run their original code, which calls LoRA layers as modules."""
    compiled = [(module, name) for module in model.modules() for name in compiled_calls(module)]
    before = [vars(module)[name] for module, name in compiled]
    try:
        for module, name in compiled:
            inner: Any = module._modules.get("_orig_mod")
            vars(module)[name] = None if inner is None else inner.__call__
        yield
    finally:
        for (module, name), call in zip(compiled, before, strict=True):
            vars(module)[name] = call


def compiled_calls(module: nn.Module) -> list[str]:
    """Names of the attributes that make a module run compiled code; none if it does not."""
    names = ["_compiled_call_impl"] + ["forward"] * ("_orig_mod" in module._modules)
    return [name for name in names if vars(module).get(name) is not None]
