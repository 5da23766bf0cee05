"""How time and memory grow with the number of classes, tokens and processes."""

import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks import measuring, report
from benchmarks.experiments.cost import contest
from benchmarks.methods import posterior
from benchmarks.models import device_of
from benchmarks.options import Cost, Scale
from benchmarks.random_models import MEANING, Shape, random_llama, random_loader
from benchmarks.report import Result, Row


def run(options: Scale) -> Iterator[Result]:
    """Measure each series."""
    series: dict[str, list[Row]] = {}
    for against, size, found in measured(options, device_of(options.device)):
        report.say(options, size, against)
        rows = series.setdefault(against, [])
        rows += [{"name": row["name"], "size": size} | row for row in found]
    parts = [
        "Random weights in the shape of Llama. Bare loops are the model's passes alone; megabytes "
        "are peaks over model and data. Exponents are least squares in logarithms."
    ]
    for against, rows in series.items():
        _add_exponents(rows)
        ordered = sorted(rows, key=lambda row: row["name"])
        parts += [f"Against the number of {against}:", report.table(ordered)]
    rows = [{"against": against, **row} for against, rows in series.items() for row in rows]
    yield {"weights": MEANING, "rows": rows}, parts


def measured(options: Scale, device: str) -> Iterator[tuple[str, int, list[Row]]]:
    """Measure: yield what is varied, its size, and the rows of figures."""
    sizes = (options.hidden_size, options.layers, 4 * options.hidden_size)
    shape = Shape(*sizes, batch_size=options.batch_size, length=64)
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
    found: dict[str, dict[str, Row]] = {}
    for key in ("bare", "lowrank_kron"):
        for kind, figures in contest(key, shape, options.batches, cost, device):
            if kind == "failed":  # there is one row less, and the reason is shown
                print(f"{key}: {figures['reason']}", file=sys.stderr)
            else:
                found.setdefault(kind, {})[key] = figures
    return [_row(kind, *of.values()) for kind, of in found.items() if len(of) == 2]


def _row(name: str, bare: Row, ours: Row) -> Row:
    return {
        "name": name,
        "seconds": ours["median"],
        "bare_seconds": bare["median"],
        "in_bare_loops": ours["median"] / bare["median"],
        "megabytes": ours["peak_megabytes"],
        "bare_megabytes": bare["peak_megabytes"],
    }


def _measure_processes(shape: Shape, world: int, options: Scale) -> Row:
    """Fit the same texts with several processes, which share the cores of one machine."""
    slowest = []
    for key in ("bare", "lowrank_kron"):
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(world) as pool:
            alone = partial(measuring.run_alone, _fit_shard, key, f"{folder}/meeting")
            shards = list(pool.map(partial(alone, shape, options, world), range(world)))
        slowest.append({figure: max(each[figure] for each in shards) for figure in shards[0]})
    return _row("fit", *slowest)


def _fit_shard(key: str, meeting: str, shape: Shape, options: Scale, world: int, rank: int) -> Row:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world)
    whole = random_loader(shape, 4 * options.batches, "cpu", options.seed)
    shard = DataLoader(
        whole.dataset,
        batch_size=shape.batch_size,
        sampler=DistributedSampler(whole.dataset, shuffle=False),
        collate_fn=whole.collate_fn,
    )
    la = posterior(key).build(random_llama(shape, "cpu", options.seed))
    with measuring.peak_memory("cpu") as memory:  # a first fit, while PyTorch loads its parts
        la.fit(shard)
    times = []
    for _ in range(options.repetitions):
        dist.barrier()
        times.append(measuring.seconds_of(partial(la.fit, shard)))
    dist.destroy_process_group()
    return {"median": statistics.median(times), "peak_megabytes": memory["megabytes"]}


def _add_exponents(rows: Sequence[Row]) -> None:
    """Add exponents to the last row of each name."""
    for name in {row["name"] for row in rows}:
        of_name = [row for row in rows if row["name"] == name]
        sizes = [row["size"] for row in of_name]
        for column, title in (("seconds", "time_exponent"), ("megabytes", "memory_exponent")):
            costs = [row[column] for row in of_name if column in row]
            if len(costs) == len(sizes):
                of_name[-1][title] = measuring.growth_exponent(sizes, costs)
