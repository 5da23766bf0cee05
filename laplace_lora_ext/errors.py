"""Error messages that say where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Put a place before the message of this library's errors that are raised within.

    Parameters
    ----------
    where : str
        such as "batch 3" or "LoRA layer encoder.layer.0"
    """
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        if type(error) not in {ValueError, NotImplementedError}:
            raise  # a subclass may carry more than a message
        raise type(error)(f"{where}: {error}") from error
