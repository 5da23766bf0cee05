"""Times, memory and time limits: what one job costs."""

import ctypes
import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch

from benchmarks.memory import BYTES_PER_MEGABYTE, PeakMemory

REASON_LENGTH = 200
SHARE_OF_LIMIT = 1 / 4
SECONDS_TO_LEAVE = 5

Send = Callable[[str, Any], None]


def seconds_of(job: Callable[[], object], device: str) -> float:
    """Time one call.

    Parameters
    ----------
    job : callable
        What to time.
    device : str
        Device that it uses: on CUDA the time is that between two events in its queue.

    Returns
    -------
    seconds : float
        Time until all of its work was done.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        job()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / 1e3
    started = time.perf_counter()
    job()
    return time.perf_counter() - started


def repeated_seconds(
    job: Callable[[], object],
    device: str,
    repetitions: int,
    limit: float | None = None,
    first: float | None = None,
) -> dict[str, Any]:
    """Time a call repeatedly, after one that warms up.

    Parameters
    ----------
    job : callable
        What to time.
    device : str
        Device that it uses.
    repetitions : int
        Calls that count; fewer of a job so slow that they would take more than a quarter of the
        limit, and the first one alone where not even one more would fit.
    limit : float, optional
        Seconds that the whole contestant has.
    first : float, optional
        Seconds of the call that warms up, where it has been made.

    Returns
    -------
    figures : dict
        Median, minimum and maximum of the seconds, the number of calls that count, and the
        seconds of each; `warmed_up` is false where the first call is the only one.
    """
    if first is None:
        first = seconds_of(job, device)
    affordable = repetitions
    if limit is not None:
        affordable = min(repetitions, int(SHARE_OF_LIMIT * limit / max(first, 1e-9)))
    times = [seconds_of(job, device) for _ in range(affordable)] or [first]
    return {
        "median": statistics.median(times),
        "minimum": min(times),
        "maximum": max(times),
        "repetitions": len(times),
        "warmed_up": affordable > 0,
        "seconds": times,
    }


def time_and_memory(
    job: Callable[[], object], device: str, repetitions: int, limit: float
) -> dict[str, Any]:
    """Time a call repeatedly, and watch the first one's memory.

    Parameters
    ----------
    job, device, repetitions, limit
        See `repeated_seconds`.

    Returns
    -------
    figures : dict
        Those of `repeated_seconds`, and `peak_megabytes` over what was in use before.
    """
    with PeakMemory(device) as memory:
        first = seconds_of(job, device)
    figures = repeated_seconds(job, device, repetitions, limit, first)
    return {**figures, "peak_megabytes": memory.megabytes}


def megabytes_in_use(device: str) -> float:
    """Memory that this process holds, after giving back what it does not need.

    Parameters
    ----------
    device : str
        A CUDA device for what PyTorch has allocated there, else for the resident set size.

    Returns
    -------
    megabytes : float
        Memory in use.
    """
    gc.collect()
    if torch.device(device).type == "cuda":
        return torch.cuda.memory_allocated() / BYTES_PER_MEGABYTE
    if sys.platform == "linux":
        # Freed memory that the C library keeps would hide the peak of what comes next.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
    return psutil.Process().memory_info().rss / BYTES_PER_MEGABYTE


def available_megabytes(device: str) -> float:
    """Memory that a new process could have.

    Parameters
    ----------
    device : str
        Device of the process.

    Returns
    -------
    megabytes : float
        Free memory of the device.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info()[0] / BYTES_PER_MEGABYTE
    return psutil.virtual_memory().available / BYTES_PER_MEGABYTE


def growth_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float | None:
    """Least-squares slope of costs against sizes, both as logarithms.

    Parameters
    ----------
    sizes, costs : sequence of float
        One cost a size.

    Returns
    -------
    exponent : float or None
        The slope; None of fewer than two sizes, and of costs that are not all above zero, as
        small differences of noisy times may be.
    """
    if len(set(sizes)) < 2 or min(costs) <= 0:
        return None
    points = list(zip(sizes, costs, strict=True))
    logarithms = torch.tensor(points, dtype=torch.float64).log()
    x, y = (logarithms - logarithms.mean(0)).T
    return (x @ y / (x @ x)).item()


def reason_of(error: BaseException) -> str:
    """One line that says what went wrong.

    Parameters
    ----------
    error : BaseException
        What was raised.

    Returns
    -------
    reason : str
        Its type and the beginning of its message; without one, the line of code that failed.
    """
    message = " ".join(str(error).split())
    if not message and error.__traceback__ is not None:  # an assertion speaks through its source
        message = traceback.extract_tb(error.__traceback__)[-1].line or ""
    if len(message) > REASON_LENGTH:
        message = message[:REASON_LENGTH].rstrip() + "..."
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def run_limited(
    job: Callable[..., None], arguments: tuple[Any, ...], limit: float | None, preload: str
) -> tuple[list[tuple[str, Any]], str | None]:
    """Run a job in a process of its own, and end it after a time.

    Parameters
    ----------
    job : callable
        Called with a function `send(kind, content)` and the arguments. The clock starts anew
        when it sends the kind "ready", so that its preparations don't count.
    arguments : tuple
        What else to call it with.
    limit : float or None
        Seconds until the process is ended; None for no limit.
    preload : str
        Module that is imported once for all such processes.

    Returns
    -------
    messages : list of tuple
        All that it has sent, also before it was ended.
    reason : str or None
        Why it did not come to its end; None if it did.
    """
    if "forkserver" in get_all_start_methods():
        context = get_context("forkserver")
        context.set_forkserver_preload([preload])
    else:
        context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_and_send, args=(job, sender, arguments), daemon=True)
    process.start()
    sender.close()
    messages: list[tuple[str, Any]] = []
    started = time.perf_counter()
    while True:
        left = None if limit is None else max(0.0, started + limit - time.perf_counter())
        if not receiver.poll(left):
            reason = f"took longer than the limit of {limit:g} s"
            break
        try:
            kind, content = receiver.recv()
        except EOFError:
            process.join()
            reason = f"its process ended with exit code {process.exitcode}"
            if process.exitcode == -9:
                reason += ", as the system ends one when memory runs out"
            break
        if kind == "end":
            process.join(SECONDS_TO_LEAVE)
            reason = content
            break
        if kind == "ready":
            started = time.perf_counter()
        messages.append((kind, content))
    process.kill()
    process.join()
    receiver.close()
    return messages, reason


def _run_and_send(
    job: Callable[..., None], connection: Connection, arguments: tuple[Any, ...]
) -> None:
    reason = None
    try:
        job(lambda kind, content: connection.send((kind, content)), *arguments)
    except Exception as error:
        reason = reason_of(error)
    connection.send(("end", reason))
