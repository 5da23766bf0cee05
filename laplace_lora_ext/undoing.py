"""Undoes what was done to a model, also where Ctrl-C comes at a bad moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def undoing(undo: Callable[[], object]) -> Iterator[None]:
    """On leaving, call `undo`, and once more if an interrupt breaks it off.

    `undo` must be right whenever it is called, also twice or before all has been done.
    """
    try:
        yield
    finally:
        try:
            undo()
        except BaseException:
            undo()
            raise


@contextmanager
def removing_hooks() -> Iterator[list[Any]]:
    """Handles of hooks that are appended to the list within are removed on leaving."""
    handles: list[Any] = []

    def remove() -> None:
        for handle in handles:
            handle.remove()

    with undoing(remove):
        yield handles
