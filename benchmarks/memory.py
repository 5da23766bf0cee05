"""Peak memory of a block of code over what was in use when the block began."""

import threading
from types import TracebackType

import psutil
import torch

SECONDS_BETWEEN_SAMPLES = 0.002
BYTES_PER_MEGABYTE = 1e6


class PeakMemory:
    """Context manager that measures the peak of this process's memory.

    On a CUDA device the peak is that of PyTorch's allocator. On a CPU it is the highest resident
    set size that a thread sees which looks every two milliseconds. The operating system's own
    high-water mark would not do: it includes the time before the block, and a process inherits it
    from the one that started it.

    Parameters
    ----------
    device : str
        Device that the code in the block uses.

    Attributes
    ----------
    megabytes : float
        After the block: the peak less what was in use when the block began.
    """

    def __init__(self, device: str) -> None:
        self._on_cuda = torch.device(device).type == "cuda"
        self._process = psutil.Process()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.megabytes = 0.0

    def __enter__(self) -> "PeakMemory":
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats()
        self._before = self._now()
        self._peak = self._before
        if not self._on_cuda:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._on_cuda:
            self._peak = torch.cuda.max_memory_allocated()
        else:
            self._done.set()
            self._thread.join()
        self.megabytes = (self._peak - self._before) / BYTES_PER_MEGABYTE

    def _now(self) -> int:
        return torch.cuda.memory_allocated() if self._on_cuda else self._process.memory_info().rss

    def _watch(self) -> None:
        while not self._done.wait(SECONDS_BETWEEN_SAMPLES):
            self._peak = max(self._peak, self._now())
