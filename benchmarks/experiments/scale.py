"""How time and memory grow with the number of classes, tokens and processes."""

import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks import measuring, report
from benchmarks.experiments.cost import Contest
from benchmarks.methods import posterior
from benchmarks.models import device_of
from benchmarks.options import Cost, Scale
from benchmarks.random_models import MEANING, Shape, random_llama, random_loader
from benchmarks.report import Result, Row

PAIR = ("bare", "lowrank_kron")  # what is compared
BATCHES_OF_PROCESSES = 4  # times those of other fits, to have some for each process


def run(options: Scale) -> Iterator[Result]:
    """Measure each series."""
    series: dict[str, list[Row]] = {}
    for against, size, rows in measured(options, device_of(options.device)):
        report.say(options, size, against)
        of_series = series.setdefault(against, [])
        for row in rows:
            of_series.append({"name": row["name"], "size": size, **row})
    parts = [
        "Random weights in the shape of Llama. Bare loops are the model's passes alone; megabytes "
        "are peaks over model and data. Exponents are least squares in logarithms."
    ]
    everything = []
    for against, rows in series.items():
        _add_exponents(rows)
        ordered = sorted(rows, key=lambda row: row["name"])
        parts.append(f"Against the number of {against}:")
        parts.append(report.table(ordered))
        everything += [{"against": against, **row} for row in rows]
    yield {"weights": MEANING, "rows": everything}, parts


def measured(
    options: Scale,
    device: str,
) -> Iterator[tuple[str, int, list[Row]]]:
    """Measure: yield what is varied, its size, and the rows of figures."""
    shape = Shape(
        hidden_size=options.hidden_size,
        layers=options.layers,
        intermediate_size=4 * options.hidden_size,
        batch_size=options.batch_size,
        length=64,
    )
    for size in options.classes:
        yield "classes", size, _beside(replace(shape, classes=size), options, device)
    for size in options.lengths:
        yield "tokens of a text", size, _beside(replace(shape, length=size), options, device)
    for size in options.processes:
        yield "processes", size, [_measure_processes(shape, size, options)]


def _beside(shape: Shape, options: Scale, device: str) -> list[Row]:
    """Fit and predict with our method and with bare passes, each in a process of its own."""
    cost = Cost(
        prediction_batch_sizes=(shape.batch_size,),
        repetitions=options.repetitions,
        limit=options.limit,
        threads=options.threads,
        seed=options.seed,
    )
    figures: dict[str, dict[str, Row]] = {}  # by the kind of a message and the method
    for key in PAIR:
        contest = Contest(key, shape, options.batches, cost, device)
        for message in contest.messages():
            if message.kind == "failed":
                # There is one row less, and the reason is shown.
                print(f"{key}: {message.content['reason']}", file=sys.stderr)
            else:
                figures.setdefault(message.kind, {})[key] = message.content
    return [
        _row(kind, of_kind["bare"], of_kind["lowrank_kron"])
        for kind, of_kind in figures.items()
        if len(of_kind) == len(PAIR)
    ]


def _row(name: str, bare: Row, ours: Row) -> Row:
    return {
        "name": name,
        "seconds": ours["median"],
        "bare_seconds": bare["median"],
        "in_bare_loops": ours["median"] / bare["median"],
        "megabytes": ours["peak_megabytes"],
        "bare_megabytes": bare["peak_megabytes"],
    }


@dataclass(frozen=True)
class Shard:
    """One process's part of a fit that several share."""

    key: str
    shape: Shape
    options: Scale
    world: int
    rank: int
    meeting: str  # a file by which the processes find each other


def _measure_processes(shape: Shape, world: int, options: Scale) -> Row:
    """Fit the same texts with several processes, which share the cores of one machine."""
    slowest = {}
    for key in PAIR:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(world) as pool:
            meeting = f"{folder}/meeting"
            shards = [Shard(key, shape, options, world, rank, meeting) for rank in range(world)]
            # The processes wait for each other, so all of them have to run at once.
            alone = partial(measuring.run_alone, _fit_shard)
            rows = list(pool.map(alone, shards))
        # All wait for the last one, and every one needs its memory.
        slowest[key] = {
            "median": max(row["median"] for row in rows),
            "peak_megabytes": max(row["peak_megabytes"] for row in rows),
        }
    return _row("fit", slowest["bare"], slowest["lowrank_kron"])


def _fit_shard(shard: Shard) -> Row:
    """Fit one process's part, together with the others."""
    options = shard.options
    # Several processes' threads would wait for the same cores.
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{shard.meeting}",
        rank=shard.rank,
        world_size=shard.world,
    )
    batches = BATCHES_OF_PROCESSES * options.batches
    whole = random_loader(shard.shape, batches, "cpu", options.seed)
    part = DataLoader(
        whole.dataset,
        batch_size=shard.shape.batch_size,
        sampler=DistributedSampler(whole.dataset, shuffle=False),
        collate_fn=whole.collate_fn,
    )
    la = posterior(shard.key).build(random_llama(shard.shape, "cpu", options.seed))
    with measuring.peak_memory("cpu") as memory:  # a first fit, while PyTorch loads its parts
        la.fit(part)
    times = []
    for _ in range(options.repetitions):
        # Who is early would count the time until the others begin.
        dist.barrier()
        times.append(measuring.seconds_of(partial(la.fit, part)))
    dist.destroy_process_group()
    return {"median": statistics.median(times), "peak_megabytes": memory.megabytes}


def _add_exponents(rows: Sequence[Row]) -> None:
    """Add exponents to the last row of each name."""
    for name in {row["name"] for row in rows}:
        of_name = [row for row in rows if row["name"] == name]
        sizes = [row["size"] for row in of_name]
        seconds = [row["seconds"] for row in of_name]
        megabytes = [row["megabytes"] for row in of_name]
        of_name[-1]["time_exponent"] = measuring.growth_exponent(sizes, seconds)
        of_name[-1]["memory_exponent"] = measuring.growth_exponent(sizes, megabytes)
