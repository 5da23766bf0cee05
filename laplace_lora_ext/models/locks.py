"""One lock a model, so that threads take turns with its hooks and its gradients' switches."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import Lock, RLock
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

Method = TypeVar("Method", bound=Callable[..., Any])

# Beside the models and not in them: a lock can be neither copied nor pickled.
_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_GUARD = Lock()


def lock_of(model: nn.Module) -> Any:
    """The lock of a model, which a thread may take again while it has it."""
    with _GUARD:
        return _LOCKS.setdefault(model, RLock())


def exclusive(method: Method) -> Method:
    """A method of a Laplace approximation during which other threads leave its model alone."""

    @wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.model.lock:
            return method(self, *args, **kwargs)

    return wrapped  # pyright: ignore[reportReturnType]
