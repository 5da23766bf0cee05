"""What a job costs: its time and memory, if need be in a process of its own."""

import ctypes
import gc
import math
import statistics
import sys
import textwrap
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.benchmark import timer  # waits for an accelerator

from benchmarks.options import Run

BYTES_PER_MEGABYTE = 1e6
SHORTEST_CALL = 1e-9  # seconds; a clock may say that a call took none
REASON_LENGTH = 200
SHARE_OF_LIMIT = 1 / 4  # for one call's repetitions, since others have to come after
KILLED = -9  # exit code
KNOWN_WARNINGS = (
    "By default `link_approx`",  # every call names its link
    "There is a performance drop",  # the stock classes' price, which tables show
    "ASDL backend is used which does not",  # likewise
)

Job = Callable[[], object]
Clock = Callable[[], float]


class Message(NamedTuple):
    """What a job in a process of its own sends: a kind, and figures.

    Of the kind "ready" they are None: the job's time begins then.
    """

    kind: str
    content: Any


def set_up(options: Run) -> None:
    """Prepare this process for an experiment."""
    for known in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=known)
    if options.threads is not None:
        torch.set_num_threads(options.threads)


@dataclass
class Memory:
    """The peak of a block, which is known when the block has ended."""

    megabytes: float = math.nan


@contextmanager
def peak_memory(device: str) -> Iterator[Memory]:
    """Measure how much memory the tensors of a block take at their peak.

    On a CUDA device PyTorch's allocator knows. On a CPU tensors are counted: what the
    process has in memory says less, since the C library keeps what was freed.
    """
    memory = Memory()
    if torch.device(device).type == "cuda":
        before = megabytes_in_use(device)
        torch.cuda.reset_peak_memory_stats()
        yield memory
        peak = torch.cuda.max_memory_allocated() / BYTES_PER_MEGABYTE
        memory.megabytes = peak - before
        return
    gc.collect()
    with _NewTensors() as tensors:
        yield memory
    memory.megabytes = tensors.peak / BYTES_PER_MEGABYTE


class _NewTensors(TorchDispatchMode):
    """Counts the bytes of tensors that are made, as long as they are there."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._bytes: dict[int, int] = {}  # of each storage, by its address

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage.data_ptr() for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            address = storage.data_ptr()
            # A view, or written to its place.
            if not address or address in given or address in self._bytes:
                continue
            self._bytes[address] = storage.nbytes()
            weakref.finalize(storage, self._bytes.pop, address, None)
        self.peak = max(self.peak, sum(self._bytes.values()))
        return result


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    """Find the storages of all tensors in nested values."""
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and value.device.type == "cpu":
            yield value.untyped_storage()


def megabytes_of(content: Any) -> float:
    """Return the MB of the tensors in nested dictionaries and lists."""
    tensors = [leaf for leaf in tree_leaves(content) if isinstance(leaf, Tensor)]
    return sum(tensor.nbytes for tensor in tensors) / BYTES_PER_MEGABYTE


def megabytes_in_use(device: str) -> float:
    """Return the memory that this process holds on a device, after clearing up."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated() / BYTES_PER_MEGABYTE
    # Freed memory that the C library keeps would hide the next peak.
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "malloc_trim"):
            library.malloc_trim(0)
    return psutil.Process().memory_info().rss / BYTES_PER_MEGABYTE


def limit_memory(device: str) -> None:
    """Make this process fail to allocate more than what is free."""
    if torch.device(device).type == "cuda" or sys.platform != "linux":
        return  # CUDA refuses by itself
    import resource  # Windows has no such module

    # Otherwise Linux would promise more than there is, and end whatever process it
    # likes.
    free = psutil.virtual_memory().available
    limit = psutil.Process().memory_info().vms + free
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def seconds_of(job: Job, clock: Clock = timer) -> float:
    """Measure the time until all work of a call is done."""
    started = clock()
    job()
    return clock() - started


def processor_clock(device: str) -> Clock:
    """Choose processor time, which does not depend on what else the processor does.

    An accelerator's work takes none: there, it is the time that passes until it is
    done.
    """
    return time.process_time if torch.device(device).type == "cpu" else timer


@dataclass(frozen=True)
class Timing:
    """Seconds of several calls."""

    seconds: list[float]
    warmed_up: bool  # whether another call went before

    @property
    def minimum(self) -> float:
        """Return the call that was disturbed least."""
        return min(self.seconds)

    def figures(self) -> dict[str, Any]:
        """Return the calls and what sums them up, by the names that figures have."""
        return {
            "median": statistics.median(self.seconds),
            "minimum": self.minimum,
            "maximum": max(self.seconds),
            "repetitions": len(self.seconds),
            "warmed_up": self.warmed_up,
            "seconds": self.seconds,
        }


def repeated_seconds(
    job: Job,
    repetitions: int,
    limit: float = math.inf,
    first: float | None = None,
    clock: Clock = timer,
) -> Timing:
    """Time a call repeatedly after a first one, for at most a quarter of the limit.

    Seconds of the first one, if it has been timed, are `first`.
    """
    if first is None:
        first = seconds_of(job, clock)
    affordable = SHARE_OF_LIMIT * limit / max(first, SHORTEST_CALL)
    count = int(min(repetitions, affordable))
    if count == 0:
        return Timing([first], warmed_up=False)
    seconds = [seconds_of(job, clock) for _ in range(count)]
    return Timing(seconds, warmed_up=True)


def time_and_memory(
    job: Job, device: str, repetitions: int, limit: float
) -> dict[str, Any]:
    """Measure figures of a call: its time, and the first call's `peak_megabytes`."""
    # Watching takes time of its own, which the others are spared.
    with peak_memory(device) as memory:
        first = seconds_of(job)
    timing = repeated_seconds(job, repetitions, limit, first)
    return {**timing.figures(), "peak_megabytes": memory.megabytes}


def growth_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float | None:
    """Fit the slope of log cost against log size; None if costs are negative."""
    if len(set(sizes)) < 2 or min(costs) <= 0:
        return None
    slope, _ = np.polyfit(np.log(sizes), np.log(costs), deg=1)
    return float(slope)


def reason_of(error: BaseException) -> str:
    """Say in one line what went wrong; without a message, the code that failed."""
    message = " ".join(str(error).split())
    if not message and error.__traceback__ is not None:  # such as an assertion
        *_, innermost = traceback.extract_tb(error.__traceback__)
        message = innermost.line or ""
    return f"{type(error).__name__}: {textwrap.shorten(message, REASON_LENGTH)}"


def run_limited(
    job: Callable[..., Iterable[Message]],
    arguments: tuple[Any, ...],
    limit: float | None = None,
) -> tuple[list[Message], str | None]:
    """Run a job in a process; return what it yielded, and why it failed.

    The limit is in seconds. If the job yields a message "ready", it counts from there.
    """
    context = _context(job)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_send_all,
        args=(sender, job, arguments),
        daemon=True,  # it ends when this process does
    )
    process.start()
    # The other process has the only sender now: the pipe ends when it does.
    sender.close()
    messages: list[Message] = []
    reason = f"took longer than the limit of {limit or 0:g} s"
    started = time.perf_counter()
    while receiver.poll(_seconds_left(started, limit)):
        try:
            message = receiver.recv()
        except EOFError:
            process.join()
            reason = _reason_of_exit(process.exitcode)
            break
        if message.kind == "end":
            reason = message.content
            break
        if message.kind == "ready":
            started = time.perf_counter()
        messages.append(message)
    # After the limit it still runs.
    process.kill()
    process.join()
    return messages, reason


def _seconds_left(started: float, limit: float | None) -> float | None:
    if limit is None:
        return None
    return max(0.0, started + limit - time.perf_counter())


def _reason_of_exit(code: int | None) -> str:
    """Say why a process ended without a word."""
    reason = f"its process ended with exit code {code}"
    # Some numerical libraries exit with 0 when they can't allocate.
    if code in (KILLED, 0):
        reason += ", as happens when memory runs out"
    return reason


def _context(job: Callable[..., Any]) -> Any:
    """Choose processes that share no memory with this one.

    Where the system can, libraries are imported once for all of them. Not where there
    is CUDA: what an import asks of it can't be asked again by a process that was
    forked.
    """
    if torch.cuda.is_available() or "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload([job.__module__])
    return context


def _send_all(
    connection: Connection,
    job: Callable[..., Iterable[Message]],
    arguments: tuple[Any, ...],
) -> None:
    """Send what a job yields, and at its end why it failed, if it did."""
    reason = None
    try:
        for message in job(*arguments):
            connection.send(message)
    # A failed allocation is one too: a figure of its method, and no end of the run.
    except Exception as error:
        reason = reason_of(error)
    connection.send(Message("end", reason))
