"""Sets a default device other than the CPU aside, but for what users wrote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

_USERS: ContextVar[torch.device | None] = ContextVar("users", default=None)


@contextmanager
def set_aside() -> Iterator[None]:
    """Within, tensors without a device are made on the CPU, whatever `set_default_device` says."""
    get = getattr(torch, "get_default_device", None)  # before PyTorch 2.3 nothing tells
    device = get() if get else torch.device("cpu")
    if device.type == "cpu":
        yield
        return
    token = _USERS.set(device)
    try:
        with torch.device("cpu"):
            yield
    finally:
        _USERS.reset(token)


def as_tensor(value: Any) -> torch.Tensor:
    """A tensor where it is, and other numbers as one on the CPU.

    Within `set_aside`, `torch.as_tensor` would move tensors from an accelerator to the CPU.
    """
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")


def restored() -> AbstractContextManager[object]:
    """For the user's own code within: the default device as it was."""
    device = _USERS.get()
    return nullcontext() if device is None else device
