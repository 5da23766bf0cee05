"""How the library's own part of a fit grows, next to its stock counterpart, without any model."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks.measuring import growth_exponent, repeated_seconds
from benchmarks.options import Cost
from benchmarks.report import Row
from laplace_lora_ext import LowRankKron
from laplace_lora_ext.curvature.statistics import KFAC_APPROX
from laplace_lora_ext.curvature.streaming import StreamingUpdates
from laplace_lora_ext.kronecker_block import KroneckerBlock

WIDEST_STOCK = 2048
NUMBERS_OF_BLOCKS = (2, 4, 8, 16)
BLOCK_WIDTH = 1024
LARGE_FACTOR_RANK = 10

Job = Callable[[], object]


def growth(options: Cost, device: str) -> list[Row]:
    """Time updates of blocks that are fed random inputs and output gradients.

    Of each series: what is timed, the sizes it is timed at, figures of `repeated_seconds` for each,
    and the exponent with which the medians grow.
    """
    jobs = _Jobs(options, device)
    widths = list(options.growth_widths)
    stock_widths = [width for width in widths if width <= WIDEST_STOCK]
    width = min(BLOCK_WIDTH, max(widths))
    many = partial(jobs.update, width)
    series: list[tuple[str, str, Sequence[int], Callable[[int], Job]]] = [
        ("lowrank_kron, one batch into one block", "d", widths, jobs.update),
        ("Stock Kron, the same: a dense d x d sum", "d", stock_widths, jobs.stock_update),
        ("lowrank_kron, decomposition of one block", "d", widths, jobs.decompose),
        ("Stock Kron, eigh of a d x d factor", "d", stock_widths, jobs.stock_decompose),
        (f"lowrank_kron, one batch into blocks of {width}", "blocks", NUMBERS_OF_BLOCKS, many),
    ]
    rows = []
    for name, against, sizes, job_of in series:
        figures = [
            repeated_seconds(job_of(size), options.repetitions, options.limit) for size in sizes
        ]
        exponent = growth_exponent(sizes, [figure["median"] for figure in figures])
        rows.append(
            {
                "name": name,
                "against": against,
                "sizes": list(sizes),
                "figures": figures,
                "exponent": exponent,
            }
        )
    return rows


class _Jobs:
    """What is timed, for a width d: a batch brings inputs `(B, T, d)` and gradients of r outputs.

    The gradients are `(C - 1, B, T, r)`.
    """

    def __init__(self, options: Cost, device: str) -> None:
        self._options = options
        self._device = torch.device(device)
        self._generator = torch.Generator().manual_seed(0)

    def update(self, width: int, number: int = 1) -> Job:
        a, g = self._arrivals(width)
        H = LowRankKron([self._empty(width) for _ in range(number)])

        def job() -> None:
            updates = StreamingUpdates(H.nbytes)
            for block in H.blocks:
                KFAC_APPROX["gradient"].add_gradients(block, a, g, lambda: None, updates)
            updates.finish()

        return job

    def decompose(self, width: int) -> Job:
        block = self._empty(width)
        a, g = self._arrivals(width)
        KFAC_APPROX["gradient"].add_gradients(block, a, g, lambda: None, StreamingUpdates(0))
        return lambda: block.cut().decompose()

    def stock_update(self, width: int) -> Job:
        rows = self._rows(width)
        factor = torch.zeros(width, width, device=self._device)
        return lambda: factor.add_(rows.mT @ rows)

    def stock_decompose(self, width: int) -> Job:
        rows = self._rows(width)
        factor = rows.mT @ rows
        return lambda: torch.linalg.eigh(factor)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(self._device)

    def _rows(self, width: int) -> torch.Tensor:
        return self._random(self._options.batch_size * self._options.length, width)

    def _arrivals(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = (self._options.batch_size, self._options.length)
        a = self._random(*rows, width)
        return a, self._random(self._options.classes - 1, *rows, self._options.rank)

    def _empty(self, width: int) -> KroneckerBlock:
        shape = (self._options.rank, width)
        return KroneckerBlock.zeros(
            shape, True, LARGE_FACTOR_RANK, True, self._device, torch.float32
        )
