"""Values and errors that the processes of a group tell each other; the group is found, not passed.

All of this is collective: every rank calls the same functions in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")

_TOGETHER: ContextVar[bool] = ContextVar("together", default=False)


class RankError(RuntimeError):
    """Another rank has failed; the message is its own."""


def count() -> int:
    """Number of processes; 1 where no process group is initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Number of this process, from 0."""
    return dist.get_rank() if count() > 1 else 0


@contextmanager
def together() -> Iterator[None]:
    """What fails on one rank within fails on all of them, by the end of the block at the latest.

    The others go on until they next hear of each other, and no longer than the time limit of the
    process group.

    Raises
    ------
    RankError
        With the message of a rank that has failed.
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

    Raises
    ------
    RankError
        If a rank has failed instead of calling this.
    """
    if count() == 1:
        return [value]
    _tell(None)
    values = []
    for source in range(count()):  # of one rank at a time: they travel through its device's memory
        box: list[Any] = [_in_main_memory(value) if source == rank() else None]
        dist.broadcast_object_list(box, src=source)
        values.append(box[0])
    return values


def of_first(value: Value) -> Value:
    """The value of rank 0, with tensors in main memory."""
    return gathered(value)[0]


def one_generator(generator: torch.Generator | None) -> torch.Generator | None:
    """The generator itself; with several processes one that gives the same numbers to all."""
    if count() == 1:
        return generator
    device = None if generator is None else generator.device
    seed = torch.randint(2**31, (), generator=generator, device=device)
    return torch.Generator().manual_seed(int(of_first(seed)))


def _tell(error: Exception | None) -> None:
    messages: list[Any] = [None] * count()
    dist.all_gather_object(messages, error and f"{type(error).__name__}: {error}")
    failed = [number for number, message in enumerate(messages) if message is not None]
    if failed and error is None:
        raise RankError(f"Rank {failed[0]} has failed. {messages[failed[0]]}")


def _in_main_memory(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()  # of a view alone, not of all that it is a view of
    if isinstance(value, Mapping):
        return {key: _in_main_memory(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_in_main_memory(part) for part in value]
    return value
