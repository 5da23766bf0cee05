"""Reads many numbers at once: on an accelerator, each reading waits for all work there."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def read(numbers: Sequence[torch.Tensor]) -> list[float]:
    """Numbers `()` on any devices as Python's own, with one wait for each device."""
    places: dict[torch.device, list[int]] = {}
    for place, number in enumerate(numbers):
        places.setdefault(number.device, []).append(place)
    found = [0.0] * len(numbers)
    for of_device in places.values():
        values = torch.stack([numbers[place].detach() for place in of_device]).tolist()
        for place, value in zip(of_device, values, strict=True):
            found[place] = value
    return found
