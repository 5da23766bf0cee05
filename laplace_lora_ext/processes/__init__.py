"""Exchanges values and errors between the processes of torch's default group.

All of this is collective: every rank must call the same functions in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

Value = TypeVar("Value")

_TOGETHER: ContextVar[bool] = ContextVar("together", default=False)


class RankError(RuntimeError):
    """Another rank failed; the message is that rank's."""


def count() -> int:
    """Count the processes; 1 without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


def rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if count() > 1 else 0


@contextmanager
def together() -> Iterator[None]:
    """Let all ranks fail in this block, before they leave it, if one does.

    The others notice at their next exchange, or when the process group's time limit
    runs out, and raise a `RankError` with the message of a rank that failed.
    """
    if count() == 1 or _TOGETHER.get():
        yield
        return
    # Only the outermost block tells of errors: if an inner one told, too, this rank
    # would make more exchanges than the others do.
    token = _TOGETHER.set(True)
    try:
        yield
        _tell(None)
    except RankError:
        raise  # all ranks have been told of it
    except Exception as error:
        _tell(error)
        raise
    finally:
        _TOGETHER.reset(token)


def gathered(value: Value) -> list[Value]:
    """Gather the values of all ranks, in their order, with tensors in main memory.

    A `RankError` if a rank failed instead of calling this.
    """
    if count() == 1:
        return [value]
    _tell(None)
    # One rank at a time, since values pass through its device's memory.
    return [_of_rank(source, value) for source in range(count())]


def of_first(value: Value) -> Value:
    """Return the value of rank 0 on every rank, with tensors in main memory."""
    if count() == 1:
        return value
    _tell(None)
    return _of_rank(0, value)


def _of_rank(source: int, value: Value) -> Value:
    """Return the value of one rank on every rank."""
    box: list[Any] = [None]
    if source == rank():
        # In main memory, and as clones: pickling a view would send the whole tensor.
        box = [tree_map_only(Tensor, lambda x: x.detach().cpu().clone(), value)]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def _tell(error: Exception | None) -> None:
    """Tell all ranks whether this one failed; a `RankError` where another one did."""
    own = None if error is None else f"{type(error).__name__}: {error}"
    messages: list[str | None] = [None] * count()
    dist.all_gather_object(messages, own)
    if error is not None:
        return  # it is raised here anyway
    for number, message in enumerate(messages):
        if message is not None:
            raise RankError(f"Rank {number} failed. {message}")
