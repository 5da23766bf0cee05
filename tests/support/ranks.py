"""Jobs that run in several processes of one gloo group."""

import os
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState
from torch import Tensor, multiprocessing
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.support.models import part_of, ragged_batches


def on_ranks(job: Callable[[int], Any], world: int) -> list[Any]:
    """Run `job(rank)` on ranks; return results or errors.

    No rank waits longer than a minute for another. The processes are forked, which
    spares them the imports.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def run(rank: int) -> None:
            # Several processes with threads of all cores each would only hinder one
            # another.
            torch.set_num_threads(1)
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder / 'meeting'}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=60),
            )
            try:
                result: Any = job(rank)
            except Exception as error:
                # A result as any other, which the test looks at.
                result = error
            torch.save(result, folder / f"{rank}.pt")

        ranks = range(world)
        processes = [context.Process(target=run, args=(rank,)) for rank in ranks]
        # All are begun before any is waited for: each waits for the others.
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        # Errors are no tensors, and the files are this module's own.
        files = [folder / f"{rank}.pt" for rank in ranks]
        return [torch.load(file, weights_only=False) for file in files]


def assert_alike(results: Sequence[Any], expected: Any, **close: float) -> None:
    """Check that all ranks have the same to the bit, close to what is expected."""
    for result in results:
        assert not isinstance(result, Exception), result
        assert_close(result, expected, **close)
        assert_close(result, results[0], rtol=0, atol=0, equal_nan=True)


def failures(results: Sequence[Any]) -> list[str]:
    """Find the messages of the ranks' errors; fail where a rank has none."""
    assert all(isinstance(result, Exception) for result in results), results
    return [str(result) for result in results]


class Texts(Dataset):
    """The examples of `ragged_batches`, each by itself."""

    def __init__(self, n: int = 11) -> None:
        lengths = [7, 4, 5, 7, 3, 6, 2] + [5] * n
        self.batches = ragged_batches(lengths[:n], batch_size=1)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return part_of(self.batches[index], 0)


def dealt(examples: Any, batch_size: int = 2) -> DataLoader:
    """Load this rank's examples, or all where there is one process."""
    sampler = None
    if dist.is_initialized():
        # In order, so that what ranks have together is what one process has.
        sampler = DistributedSampler(examples, shuffle=False)
    return DataLoader(examples, batch_size=batch_size, sampler=sampler)


def strided_loader(n: int = 11) -> DataLoader:
    """Load this rank's texts."""
    return dealt(Texts(n))


def launched(rank: int, world: int, port: int = 29516) -> None:
    """Pretend that this rank was started by a launcher, such as torchrun."""
    for prefix in ("", "LOCAL_"):
        os.environ[f"{prefix}RANK"] = str(rank)
        os.environ[f"{prefix}WORLD_SIZE"] = str(world)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    # Those of the process which this one was forked from.
    PartialState._reset_state()
    AcceleratorState._reset_state()


def accelerated(rank: int, world: int, loader: DataLoader, **options: Any) -> Any:
    """Prepare a loader as an `Accelerator` of this process group does."""
    launched(rank, world)
    PartialState(cpu=True)
    return prepare_data_loader(loader, put_on_device=True, **options)
