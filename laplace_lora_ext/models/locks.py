"""One lock for each model: threads take turns with its hooks and with `requires_grad`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from threading import Lock, RLock
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from laplace_lora_ext.models.default_device import set_aside

Method = TypeVar("Method", bound=Callable[..., Any])

# Beside the models and not in them: a lock can be neither copied nor pickled.
_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_TORN: WeakSet[nn.Module] = WeakSet()  # in a forked process: held by a thread that is not there
_GUARD = Lock()


def lock_of(model: nn.Module) -> Any:
    """The lock of a model; the thread that holds it may take it again.

    A `RuntimeError` in a process that was forked while another thread held it.
    """
    with _GUARD:
        if model in _TORN:
            raise RuntimeError(
                "This process was forked while another thread ran the model, which may be half "
                "prepared: load it anew here, or fork before or after."
            )
        return _LOCKS.setdefault(model, RLock())


def _after_fork() -> None:
    """In the child, where the threads that held locks are missing."""
    global _GUARD
    _GUARD = Lock()
    for model, lock in list(_LOCKS.items()):
        if lock.acquire(blocking=False):
            lock.release()
        else:
            _TORN.add(model)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def exclusive(method: Method) -> Method:
    """Make other threads wait for the model while a method of a Laplace approximation runs.

    It also sets aside a default device other than the CPU.
    """

    @wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.model.lock, set_aside():
            return method(self, *args, **kwargs)

    return wrapped  # pyright: ignore[reportReturnType]
