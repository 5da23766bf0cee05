"""One lock for each model: threads take turns with its hooks and with `requires_grad`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import Lock, RLock
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from laplace_lora_ext.models.default_device import set_aside

Method = TypeVar("Method", bound=Callable[..., Any])

# Beside the models and not in them: a lock can be neither copied nor pickled.
_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_GUARD = Lock()


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
        with self.model.lock, set_aside():
            return method(self, *args, **kwargs)

    return wrapped  # pyright: ignore[reportReturnType]
