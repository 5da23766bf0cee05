"""Exchanges values and errors between the processes of torch's default group.

All of this is collective: every rank must call the same functions in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

Value = TypeVar("Value")

_TOGETHER: ContextVar[bool] = ContextVar("together", default=False)


class RankError(RuntimeError):
    """Another rank failed; the message is that rank's."""


def count() -> int:
    """Number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Number of this process, from 0."""
    return dist.get_rank() if count() > 1 else 0


@contextmanager
def together() -> Iterator[None]:
    """If one rank fails in this block, all ranks fail before they leave it.

    The others notice at their next exchange, or when the process group's time limit runs out, and
    raise a `RankError` with the message of a rank that failed.
    """
    if count() == 1 or _TOGETHER.get():
        yield
        return
    token = _TOGETHER.set(True)
    try:
        yield
        _tell(None)
    except RankError:
        raise
    except Exception as error:
        _tell(error)
        raise
    finally:
        _TOGETHER.reset(token)


def gathered(value: Value) -> list[Value]:
    """The values of all ranks, in their order, with tensors in main memory.

    A `RankError` if a rank failed instead of calling this.
    """
    if count() == 1:
        return [value]
    _tell(None)
    values = []
    # Clones, since pickling a view would send the whole tensor.
    own = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu().clone(), value)
    for source in range(count()):  # one rank at a time: values pass through its device's memory
        box: list[Any] = [own if source == rank() else None]
        dist.broadcast_object_list(box, src=source)
        values.append(box[0])
    return values


def of_first(value: Value) -> Value:
    """The value of rank 0, with tensors in main memory."""
    return gathered(value)[0]


def _tell(error: Exception | None) -> None:
    messages: list[Any] = [None] * count()
    dist.all_gather_object(messages, error and f"{type(error).__name__}: {error}")
    failed = [number for number, message in enumerate(messages) if message is not None]
    if failed and error is None:
        raise RankError(f"Rank {failed[0]} failed. {messages[failed[0]]}")
