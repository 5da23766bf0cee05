"""Numbers of tensors: read at once, and computed in the precision that they are held in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch

Method = TypeVar("Method", bound=Callable[..., Any])


def read(numbers: Sequence[torch.Tensor]) -> list[float]:
    """Numbers `()` on any devices as Python's own, with one wait for each device.

    On an accelerator, each reading waits for all work there.
    """
    places: dict[torch.device, list[int]] = {}
    for place, number in enumerate(numbers):
        places.setdefault(number.device, []).append(place)
    found = [0.0] * len(numbers)
    for of_device in places.values():
        values = torch.stack([numbers[place].detach() for place in of_device]).tolist()
        for place, value in zip(of_device, values, strict=True):
            found[place] = value
    return found


def without_autocast(method: Method) -> Method:
    """Shield a method of an object with a `_device` from the user's `torch.autocast`."""

    @wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device.type, enabled=False):
            return method(self, *args, **kwargs)

    return wrapped  # pyright: ignore[reportReturnType]
