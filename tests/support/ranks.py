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
from torch import multiprocessing
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.support.models import ragged_batches


def on_ranks(
    job: Callable[..., Any], world: int, *arguments: Any, time_limit: float = 60
) -> list[Any]:
    """What `job(rank, *arguments)` returns on each rank, or the error that it raises.

    No rank waits longer for another than the limit, in seconds. The processes are forked, which
    spares them the imports.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_run, args=(job, rank, world, Path(folder), time_limit, arguments)
            )
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return [_result(Path(folder) / f"{rank}.pt") for rank in range(world)]


def assert_alike(results: Sequence[Any], expected: Any, **close: float) -> None:
    """No rank has failed, all have the same to the bit, and it is close to what is expected."""
    for result in results:
        assert not isinstance(result, Exception), result
        assert_close(result, expected, **close)
        assert_close(result, results[0], rtol=0, atol=0)


def failures(results: Sequence[Any]) -> list[str]:
    """Messages of the ranks' errors; fails where a rank has none."""
    assert all(isinstance(result, Exception) for result in results), results
    return [str(result) for result in results]


def _run(
    job: Callable[..., Any],
    rank: int,
    world: int,
    folder: Path,
    time_limit: float,
    arguments: Sequence[Any],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=time_limit),
    )
    try:
        result: Any = job(rank, *arguments)
    except Exception as error:
        result = error
    torch.save(result, folder / f"{rank}.pt")


def _result(path: Path) -> Any:
    return torch.load(path, weights_only=False) if path.exists() else RuntimeError("killed")


class Texts(Dataset):
    """The examples of `ragged_batches`, each by itself."""

    def __init__(self, n: int = 11) -> None:
        lengths = [7, 4, 5, 7, 3, 6, 2][: min(n, 7)] + [5] * max(0, n - 7)
        self.batches = ragged_batches(lengths=lengths, batch_size=1)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: value[0] for key, value in self.batches[index].items()}


def strided_loader(n: int = 11, batch_size: int = 2) -> DataLoader:
    """Texts of this rank, by a `DistributedSampler`; all texts where there is one process."""
    texts = Texts(n)
    sampler = DistributedSampler(texts, shuffle=False) if dist.is_initialized() else None
    return DataLoader(texts, batch_size=batch_size, sampler=sampler)


def accelerated(rank: int, world: int, loader: DataLoader, **options: Any) -> Any:
    """A loader as an `Accelerator` of this process group prepares it."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {name: str(number) for name, number in place.items()}
    os.environ["MASTER_ADDR"] = "localhost"
    PartialState._reset_state()  # of the process that this one was forked from
    PartialState(cpu=True)
    return prepare_data_loader(loader, put_on_device=True, **options)
