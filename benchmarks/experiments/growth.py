"""How the library's own part of a fit grows, and its stock counterpart, without any model."""

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

WIDEST_STOCK = 2048
NUMBERS_OF_BLOCKS = (2, 4, 8, 16)
BLOCK_WIDTH = 1024


def growth(options: Cost, device: str) -> list[Row]:
    """Time how long blocks of each size take to update and to decompose, on random numbers."""
    generator = torch.Generator().manual_seed(0)
    texts = (options.batch_size, options.length)
    limits = (options.repetitions, options.limit)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    def sums(width: int, number: int) -> tuple[LowRankKron, Job]:
        """Empty sums of a number of blocks, and a function that adds a batch to each."""
        a, g = random(*texts, width), random(options.classes - 1, *texts, options.rank)
        like = (True, LARGE_FACTOR_RANK, True, torch.device(device), torch.float32)
        shape = (options.rank, width)
        H = LowRankKron([KroneckerBlock.zeros(shape, *like) for _ in range(number)])
        positions = Positions(len(a), len(a), a.shape[1], None)

        def add() -> None:
            sums = KFAC_APPROX["gradient"](H.blocks, StreamingUpdates(H.nbytes))
            for index in range(number):
                sums.add_gradients(Rows(index, a, g, [a.shape[1]], positions))
            sums.updates.finish()

        return H, add

    def decompose(width: int) -> Job:
        H, add = sums(width, 1)
        add()
        return lambda: H.blocks[0].cut().decompose()

    def stock_update(width: int) -> Job:
        rows = random(*texts, width).flatten(0, 1)
        factor = torch.zeros(width, width, device=device)
        return lambda: factor.add_(rows.mT @ rows)

    def stock_decompose(width: int) -> Job:
        rows = random(*texts, width).flatten(0, 1)
        return partial(torch.linalg.eigh, rows.mT @ rows)

    widths = options.growth_widths
    stock_widths = [width for width in widths if width <= WIDEST_STOCK]
    width = min(BLOCK_WIDTH, max(widths))
    series = []
    for name, against, sizes, job_of in (
        ("lowrank_kron, one batch into one block", "d", widths, lambda d: sums(d, 1)[1]),
        ("Stock Kron, the same: a dense d x d sum", "d", stock_widths, stock_update),
        ("lowrank_kron, decomposition of one block", "d", widths, decompose),
        ("Stock Kron, eigh of a d x d factor", "d", stock_widths, stock_decompose),
        (
            *(f"lowrank_kron, one batch into blocks of {width}", "blocks", NUMBERS_OF_BLOCKS),
            lambda number: sums(width, number)[1],
        ),
    ):
        figures = [repeated_seconds(job_of(size), *limits) for size in sizes]
        seconds = [figure["median"] for figure in figures]
        row = {"name": name, "against": against, "sizes": list(sizes), "figures": figures}
        series.append({**row, "seconds": seconds, "exponent": growth_exponent(sizes, seconds)})
    return series
