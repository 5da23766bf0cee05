"""How the library's own part of a fit grows, next to its stock counterpart, without any model."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measuring import growth_exponent, repeated_seconds
from laplace_lora_ext.curvature.statistics import KFAC_APPROX
from laplace_lora_ext.curvature.streaming import StreamingUpdates
from laplace_lora_ext.curvature.block import KroneckerBlock
from laplace_lora_ext.curvature.matrix import LowRankKron

WIDTHS = (512, 1024, 2048, 4096, 8192)
WIDEST_STOCK = 2048
NUMBERS_OF_BLOCKS = (2, 4, 8, 16)
BLOCK_WIDTH = 1024
LARGE_FACTOR_RANK = 10


def growth(
    batch_size: int,
    length: int,
    classes: int,
    rank: int,
    device: str,
    repetitions: int,
    limit: float,
    widths: tuple[int, ...] = WIDTHS,
) -> list[dict[str, Any]]:
    """Time updates of blocks that are fed random inputs and output gradients.

    Parameters
    ----------
    batch_size, length, classes, rank : int
        B, T, C and r: a batch brings inputs (B, T, d) and output gradients (C - 1, B, T, r).
    device : str
        Where to compute.
    repetitions : int
        Calls that count.
    limit : float
        Four times the seconds that one series of calls may take.
    widths : tuple of int
        Sizes d of the large factor.

    Returns
    -------
    series : list of dict
        What is timed, the sizes it is timed at, figures of `repeated_seconds` for each, and the
        exponent with which the medians grow.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    def arrivals(width: int) -> tuple[torch.Tensor, torch.Tensor]:
        a = random(batch_size, length, width)
        return a, random(classes - 1, batch_size, length, rank)

    def empty(width: int) -> KroneckerBlock:
        return KroneckerBlock.zeros(
            (rank, width), True, LARGE_FACTOR_RANK, True, torch.device(device), torch.float32
        )

    def update(width: int, number: int = 1) -> Callable[[], None]:
        a, g = arrivals(width)
        H = LowRankKron([empty(width) for _ in range(number)])

        def job() -> None:
            updates = StreamingUpdates(H.nbytes)
            for block in H.blocks:
                KFAC_APPROX["gradient"].add_gradients(block, a, g, lambda: None, updates)
            updates.finish()

        return job

    def decompose(width: int) -> Callable[[], None]:
        block = empty(width)
        a, g = arrivals(width)
        KFAC_APPROX["gradient"].add_gradients(block, a, g, lambda: None, StreamingUpdates(0))
        return lambda: _discard(block.cut().decompose())

    def stock_update(width: int) -> Callable[[], None]:
        rows = random(batch_size * length, width)
        factor = torch.zeros(width, width, device=device)
        return lambda: _discard(factor.add_(rows.mT @ rows))

    def stock_decompose(width: int) -> Callable[[], None]:
        rows = random(batch_size * length, width)
        factor = rows.mT @ rows
        return lambda: _discard(torch.linalg.eigh(factor))

    def measured(
        name: str, against: str, sizes: tuple[int, ...], job_of: Callable[[int], Callable[[], None]]
    ) -> dict[str, Any]:
        figures = [repeated_seconds(job_of(size), device, repetitions, limit) for size in sizes]
        medians = [figure["median"] for figure in figures]
        return {
            "name": name,
            "against": against,
            "sizes": list(sizes),
            "figures": figures,
            "exponent": growth_exponent(sizes, medians),
        }

    stock_widths = tuple(width for width in widths if width <= WIDEST_STOCK)
    return [
        measured("lowrank_kron, one batch into one block", "d", widths, update),
        measured("Stock Kron, the same: a dense d x d sum", "d", stock_widths, stock_update),
        measured("lowrank_kron, decomposition of one block", "d", widths, decompose),
        measured("Stock Kron, eigh of a d x d factor", "d", stock_widths, stock_decompose),
        measured(
            f"lowrank_kron, one batch into blocks of {min(BLOCK_WIDTH, max(widths))}",
            "blocks",
            NUMBERS_OF_BLOCKS,
            lambda number: update(min(BLOCK_WIDTH, max(widths)), number),
        ),
    ]


def _discard(_: object) -> None:
    """Make a job's result nothing."""
