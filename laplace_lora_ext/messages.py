"""Raises errors that say where or which number, and warns at the user's own line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch

_OURS = ("laplace_lora_ext", "laplace", "torch", "contextlib")
_MOST_LISTED = 8


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Begin the message of a wrong value's error with a place, such as "batch 3"."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        # A subclass may carry more than a message, which a new error would lose.
        if type(error) not in {ValueError, NotImplementedError}:
            raise
        raise type(error)(f"{where}: {error}") from error


def warn(message: str) -> None:
    """Warn at the user's line, outside of this library, the host and torch."""
    frame = sys._getframe()
    level = 1
    while frame.f_back is not None:
        module: str = frame.f_globals.get("__name__", "")
        package, _, _ = module.partition(".")
        if package not in _OURS:
            break
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)


def check_count(name: str, number: Any, least: int = 1) -> None:
    """Refuse a number of things that is not whole, or too small."""
    if not isinstance(number, Integral) or number < least:
        raise ValueError(f"{name} must be at least {least}, and whole, not {number!r}.")


def check_name(what: str, value: Any, known: Collection[str]) -> None:
    """Refuse what is none of some names."""
    if value not in known:
        raise ValueError(f"{what} {value!r} is none of {list(known)}.")


def check_positive(name: str, value: Any) -> None:
    """Refuse numbers that make no Gaussian: negative, 0 or infinite ones."""
    device = getattr(value, "device", "cpu")
    numbers = torch.as_tensor(value, device=device).detach()
    are_right = torch.isfinite(numbers) & (numbers > 0)
    if not bool(are_right.all()):
        raise ValueError(f"{name} must be positive and finite, not {numbers.tolist()}.")


def listed(names: Sequence[str]) -> str:
    """List the first names, and say how many more there are."""
    first = ", ".join(names[:_MOST_LISTED])
    n_more = len(names) - _MOST_LISTED
    return f"{first} and {n_more} more" if n_more > 0 else first
