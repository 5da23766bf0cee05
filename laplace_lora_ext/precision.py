"""Keeps the posterior's algebra in the precision that it is held in."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

Method = TypeVar("Method", bound=Callable[..., Any])


def without_autocast(method: Method) -> Method:
    """Shield a method of an object with a `_device` from the user's `torch.autocast`."""

    @wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device.type, enabled=False):
            return method(self, *args, **kwargs)

    return wrapped  # pyright: ignore[reportReturnType]
