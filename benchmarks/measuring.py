"""What a job costs: its time and memory, if need be in a process of its own."""

import ctypes
import gc
import math
import statistics
import sys
import textwrap
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_all_start_methods, get_context
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.benchmark import timer  # waits for an accelerator

from benchmarks.options import Run

BYTES_PER_MEGABYTE = 1e6
SECONDS_BETWEEN_SAMPLES = 0.002
REASON_LENGTH = 200
SHARE_OF_LIMIT = 1 / 4
KNOWN_WARNINGS = (
    "By default `link_approx`",  # every call names its link
    "The posterior is over lora_A and lora_B",  # a head stays at its MAP value everywhere
    "There is a performance drop",  # the stock classes' price, which tables show
    "ASDL backend is used which does not",  # likewise
)

Job = Callable[[], object]
Clock = Callable[[], float]
Message = tuple[str, Any]  # a kind, and figures


def set_up(options: Run) -> None:
    """Prepare this process for an experiment."""
    for known in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=known)
    if options.threads is not None:
        torch.set_num_threads(options.threads)


@contextmanager
def peak_memory(device: str) -> Iterator[dict[str, float]]:
    """Measure by how many "megabytes" a block raises this process's memory at its peak.

    On a CUDA device PyTorch's allocator knows. On a CPU a thread reads the resident set size every
    two milliseconds: the system's own high-water mark includes the time before the block, and a
    process inherits it from its parent.
    """
    on_cuda, process = torch.device(device).type == "cuda", psutil.Process()
    before = megabytes_in_use(device) * BYTES_PER_MEGABYTE
    done, found, peak = threading.Event(), {}, before

    def watch() -> None:
        nonlocal peak
        while not done.wait(SECONDS_BETWEEN_SAMPLES):
            peak = max(peak, process.memory_info().rss)

    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield found
    finally:
        done.set()
        peak = torch.cuda.max_memory_allocated() if on_cuda else peak
        found["megabytes"] = (peak - before) / BYTES_PER_MEGABYTE


def megabytes_in_use(device: str) -> float:
    """Memory that this process holds on a device, after it has freed what it doesn't need."""
    gc.collect()
    if torch.device(device).type == "cuda":
        return torch.cuda.memory_allocated() / BYTES_PER_MEGABYTE
    # Freed memory that the C library keeps would hide the next peak.
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss / BYTES_PER_MEGABYTE


def limit_memory(megabytes: float | None, device: str) -> None:
    """Make this process fail to allocate more than that, or than what is free."""
    if torch.device(device).type == "cuda" or sys.platform != "linux":
        return  # CUDA refuses by itself
    import resource

    free = psutil.virtual_memory().available
    wanted = free if megabytes is None else int(megabytes * BYTES_PER_MEGABYTE)
    limit = psutil.Process().memory_info().vms + wanted
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def seconds_of(job: Job, clock: Clock = timer) -> float:
    """Time until all work of a call is done."""
    started = clock()
    job()
    return clock() - started


def repeated_seconds(
    job: Job,
    repetitions: int,
    limit: float = math.inf,
    first: float | None = None,
    clock: Clock = timer,
) -> dict[str, Any]:
    """Time a call repeatedly after a first one, for at most a quarter of the limit."""
    first = seconds_of(job, clock) if first is None else first
    affordable = int(min(repetitions, SHARE_OF_LIMIT * limit / max(first, 1e-9)))
    times = [seconds_of(job, clock) for _ in range(affordable)] or [first]
    spread = {"median": statistics.median(times), "minimum": min(times), "maximum": max(times)}
    calls = {"repetitions": len(times), "warmed_up": affordable > 0, "seconds": times}
    return {**spread, **calls}


def time_and_memory(job: Job, device: str, repetitions: int, limit: float) -> dict[str, Any]:
    """`repeated_seconds`, and the first call's `peak_megabytes`."""
    with peak_memory(device) as memory:
        first = seconds_of(job)
    figures = repeated_seconds(job, repetitions, limit, first)
    return {**figures, "peak_megabytes": memory["megabytes"]}


def growth_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float | None:
    """Slope of log cost against log size; None if noise makes a cost negative."""
    if len(set(sizes)) < 2 or min(costs) <= 0:
        return None
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def reason_of(error: BaseException) -> str:
    """What went wrong, in one line; for an error without a message, the code that failed."""
    message = " ".join(str(error).split())
    if not message and error.__traceback__ is not None:  # such as an assertion
        message = traceback.extract_tb(error.__traceback__)[-1].line or ""
    return f"{type(error).__name__}: {textwrap.shorten(message, REASON_LENGTH)}"


def run_alone(job: Callable[..., Any], *arguments: Any) -> Any:
    """Run a job in a process of its own, whose memory is untouched, and return its result."""
    with ProcessPoolExecutor(1, _context(job)) as pool:
        return pool.submit(job, *arguments).result()


def run_limited(
    job: Callable[..., Iterable[Message]], arguments: tuple[Any, ...], limit: float | None = None
) -> tuple[list[Message], str | None]:
    """Run a job in a process of its own; return what it yielded, and why it failed, if it did.

    The limit is in seconds. If the job yields a message "ready", it counts from there.
    """
    context = _context(job)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_all, args=(sender, job, arguments), daemon=True)
    process.start()
    sender.close()
    messages: list[Message] = []
    started, reason = time.perf_counter(), f"took longer than the limit of {limit or 0:g} s"
    while receiver.poll(limit and max(0.0, started + limit - time.perf_counter())):
        try:
            message = receiver.recv()
        except EOFError:
            process.join()
            reason = f"its process ended with exit code {process.exitcode}"
            # Some numerical libraries exit with 0 when they can't allocate.
            if process.exitcode in (-9, 0):
                reason += ", as happens when memory runs out"
            break
        if message[0] == "end":
            reason = message[1]
            break
        if message[0] == "ready":
            started = time.perf_counter()
        messages.append(message)
    process.kill()
    process.join()
    return messages, reason


def _context(job: Callable[..., Any]) -> Any:
    """Processes that share no memory with this one; libraries are imported once for all of them."""
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload([job.__module__])
    return context


def _send_all(connection: Any, job: Callable[..., Iterable[Message]], arguments: tuple) -> None:
    reason = None
    try:
        for message in job(*arguments):
            connection.send(message)
    except Exception as error:
        reason = reason_of(error)
    connection.send(("end", reason))
