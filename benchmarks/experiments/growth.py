"""How the library's own part of a fit grows, next to its stock counterpart, without any model."""

from functools import partial

import torch

from benchmarks.measuring import Job, growth_exponent, repeated_seconds
from benchmarks.methods.posteriors import LARGE_FACTOR_RANK
from benchmarks.options import Cost
from benchmarks.report import Row
from laplace_lora_ext import LowRankKron
from laplace_lora_ext.curvature.block import KroneckerBlock
from laplace_lora_ext.curvature.statistics import KFAC_APPROX
from laplace_lora_ext.curvature.streaming import StreamingUpdates
from laplace_lora_ext.models.positions import Positions
from laplace_lora_ext.passes import Rows
from laplace_lora_ext.passes.layouts import Together

WIDEST_STOCK = 2048
NUMBERS_OF_BLOCKS = (2, 4, 8, 16)
BLOCK_WIDTH = 1024


def growth(options: Cost, device: str) -> list[Row]:
    """Time updates of blocks that are fed random inputs and output gradients, by their sizes."""
    jobs = _Jobs(options, device)
    widths = list(options.growth_widths)
    stock_widths = [width for width in widths if width <= WIDEST_STOCK]
    width = min(BLOCK_WIDTH, max(widths))
    many = partial(jobs.update, width)
    rows = []
    for name, against, sizes, job_of in (
        ("lowrank_kron, one batch into one block", "d", widths, jobs.update),
        ("Stock Kron, the same: a dense d x d sum", "d", stock_widths, jobs.stock_update),
        ("lowrank_kron, decomposition of one block", "d", widths, jobs.decompose),
        ("Stock Kron, eigh of a d x d factor", "d", stock_widths, jobs.stock_decompose),
        (f"lowrank_kron, one batch into blocks of {width}", "blocks", NUMBERS_OF_BLOCKS, many),
    ):
        limits = (options.repetitions, options.limit)
        figures = [repeated_seconds(job_of(size), *limits) for size in sizes]
        row = {"name": name, "against": against, "sizes": list(sizes), "figures": figures}
        seconds = [figure["median"] for figure in figures]
        rows.append({**row, "seconds": seconds, "exponent": growth_exponent(sizes, seconds)})
    return rows


class _Jobs:
    """What is timed: batches bring inputs `(B, T, d)` and output gradients `(C - 1, B, T, r)`."""

    def __init__(self, options: Cost, device: str) -> None:
        self._options = options
        self._texts = (options.batch_size, options.length)
        self._device = torch.device(device)
        self._generator = torch.Generator().manual_seed(0)

    def update(self, width: int, number: int = 1) -> Job:
        return self._sums(width, number)[1]

    def decompose(self, width: int) -> Job:
        H, add = self._sums(width, 1)
        add()
        return lambda: H.blocks[0].cut().decompose()

    def stock_update(self, width: int) -> Job:
        rows = self._random(*self._texts, width).flatten(0, 1)
        factor = torch.zeros(width, width, device=self._device)
        return lambda: factor.add_(rows.mT @ rows)

    def stock_decompose(self, width: int) -> Job:
        rows = self._random(*self._texts, width).flatten(0, 1)
        factor = rows.mT @ rows
        return lambda: torch.linalg.eigh(factor)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(self._device)

    def _sums(self, width: int, number: int) -> tuple[LowRankKron, Job]:
        """Empty sums of so many blocks, and what adds a batch to each of them."""
        a, rank = self._random(*self._texts, width), self._options.rank
        g = self._random(self._options.classes - 1, *self._texts, rank)
        like = (True, LARGE_FACTOR_RANK, True, self._device, torch.float32)
        H = LowRankKron([KroneckerBlock.zeros((rank, width), *like) for _ in range(number)])
        positions = Positions(len(a), len(a), a.shape[1], None)

        def add() -> None:
            sums = KFAC_APPROX["gradient"](H.blocks, StreamingUpdates(H.nbytes))
            for index in range(number):
                sums.add_gradients(Rows(index, a, g, [(Together(), a.shape[1])], positions))
            sums.updates.finish()

        return H, add
