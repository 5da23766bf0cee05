"""How time and memory grow with examples, classes, length and processes, beside bare passes."""

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import multiprocessing
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks import measuring
from benchmarks.experiments.cost import contest
from benchmarks.methods import posterior
from benchmarks.models import device_of
from benchmarks.options import Cost, Scale
from benchmarks.random_models import MEANING, Shape, random_llama, random_loader
from benchmarks.report import Figures, Row, hardware_of, provenance, save, table, write
from laplace_lora_ext import LinearizedModel

VOCABULARY = 1000
BLOCKS = 24  # whose features the linearised model has
PRIOR_PRECISION = torch.tensor([1.0])
COLUMNS = [
    *("name", "size", "seconds", "bare_seconds", "in_bare_loops"),
    *("megabytes", "bare_megabytes", "time_exponent", "memory_exponent"),
]


def run(options: Scale) -> Figures:
    """Measure each series, and write table, figures and plot."""
    started = time.perf_counter()
    device = device_of(options.device)
    measuring.set_up(options)
    base = Shape(
        hidden_size=options.hidden_size,
        layers=options.layers,
        intermediate_size=4 * options.hidden_size,
        heads=4,
        vocabulary=VOCABULARY,
        rank=8,
        target_modules=("q_proj", "v_proj"),
        classes=4,
        batch_size=options.batch_size,
        length=64,
        dtype="float32",
    )
    series = {
        "classes": [replace(base, classes=number) for number in options.classes],
        "tokens of a text": [replace(base, length=number) for number in options.lengths],
    }
    sizes = {"classes": options.classes, "tokens of a text": options.lengths}
    rows = []
    for against, shapes in series.items():
        for size, shape in zip(sizes[against], shapes, strict=True):
            _say(options, f"{size} {against}")
            rows += [{"against": against, "size": size, **row} for row in _beside(shape, options)]
    for size in options.examples:
        _say(options, f"{size} examples")
        found = measuring.run_alone(_measure_examples, size, options, device)
        rows += [{"against": "examples", "size": size, **row} for row in found]
    for size in options.processes:
        _say(options, f"{size} processes")
        rows.append(
            {"against": "processes", "size": size, **_measure_processes(base, size, options)}
        )
    figures = {
        "weights": MEANING,
        **provenance(options, device),
        "rows": _with_exponents(rows),
        "seconds": time.perf_counter() - started,
    }
    write(options.output, "scale", figures, _text_of(figures))
    _draw(rows, options.output / "scale.png")
    return figures


def _say(options: Scale, what: str) -> None:
    if not options.quiet:
        print(what, file=sys.stderr)


def _beside(shape: Shape, options: Scale) -> list[Row]:
    """A fit and a prediction, ours and the passes alone, each in a process of its own."""
    cost = Cost(
        prediction_batch_sizes=(shape.batch_size,),
        repetitions=options.repetitions,
        limit=options.limit,
        threads=options.threads,
        seed=options.seed,
    )
    device = device_of(options.device)
    found: dict[str, dict[str, Row]] = {}
    for key in ("bare", "lowrank_kron"):
        for kind, figures in contest(key, shape, options.batches, cost, device):
            if kind == "failed":  # a row less, and the reason in sight
                print(f"{key}: {figures['reason']}", file=sys.stderr)
            else:
                found.setdefault(kind, {})[key] = figures
    return [
        {
            "name": kind,
            "seconds": ours["median"],
            "bare_seconds": bare["median"],
            "in_bare_loops": ours["median"] / bare["median"],
            "megabytes": ours["peak_megabytes"],
            "bare_megabytes": bare["peak_megabytes"],
        }
        for kind, (bare, ours) in ((k, f.values()) for k, f in found.items() if len(f) == 2)
    ]


def _measure_examples(send: measuring.Send, n: int, options: Scale, device: str) -> None:
    """One evaluation of the linearised evidence and of leave-one-out, on random features."""
    measuring.set_up(options)
    generator = torch.Generator().manual_seed(options.seed)
    scale = (torch.arange(options.features) + 1.0).rsqrt()
    features = torch.randn(n, 4, options.features, generator=generator) * scale
    offset = torch.randn(n, 4, generator=generator)
    logits = offset + features @ torch.randn(options.features, generator=generator)
    targets = logits.argmax(-1)
    block = torch.arange(options.features) * BLOCKS // options.features
    model = LinearizedModel(logits, features, block, offset, targets, "classification")
    rows = []
    for name, job in (
        ("linearized_marglik, one evaluation", partial(model.evidence, PRIOR_PRECISION)),
        ("linearized_loo, one evaluation", partial(model.leave_one_out, PRIOR_PRECISION)),
    ):
        figures = measuring.time_and_memory(job, device, options.repetitions, options.limit)
        held = features.nbytes / measuring.BYTES_PER_MEGABYTE
        megabytes = figures["peak_megabytes"] + held
        rows.append({"name": name, "seconds": figures["median"], "megabytes": megabytes})
    send("rows", rows)


def _measure_processes(shape: Shape, world: int, options: Scale) -> Row:
    """A fit of the same texts by some processes on one machine, which share its cores."""
    has_server = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if has_server else "spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, folder, shape, options, results)
        processes = [
            context.Process(target=_fit_shard, args=(rank, *arguments)) for rank in range(world)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"{world} processes: one has failed")
    times = [results.get() for _ in processes]
    return {"name": "fit", **{key: max(each[key] for each in times) for key in times[0]}}


def _fit_shard(
    rank: int, world: int, folder: str, shape: Shape, options: Scale, results: Any
) -> None:
    torch.set_num_threads(1)
    where = f"file://{Path(folder) / 'meeting'}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world)
    model = random_llama(shape, "cpu", options.seed)
    whole = random_loader(shape, 4 * options.batches, "cpu", options.seed)
    shard = DataLoader(
        whole.dataset,
        batch_size=shape.batch_size,
        sampler=DistributedSampler(whole.dataset, shuffle=False),
        collate_fn=whole.collate_fn,
    )
    row: Row = {}
    for key, name in (("bare", "bare_seconds"), ("lowrank_kron", "seconds")):
        la = posterior(key).build(model)
        la.fit(shard)  # once for what PyTorch loads
        dist.barrier()
        row[name] = measuring.seconds_of(partial(la.fit, shard))
    results.put({**row, "in_bare_loops": row["seconds"] / row["bare_seconds"]})


def _with_exponents(rows: Sequence[Row]) -> list[Row]:
    """The rows, with exponents of each series in its last one."""
    last: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        last.setdefault((row["against"], row["name"]), []).append(row)
    for series in last.values():
        sizes = [row["size"] for row in series]
        for column, name in (("seconds", "time_exponent"), ("megabytes", "memory_exponent")):
            costs = [row[column] for row in series if column in row]
            if len(costs) == len(sizes):
                series[-1][name] = measuring.growth_exponent(sizes, costs)
    return list(rows)


def _text_of(figures: Figures) -> str:
    parts = [
        "Random weights in the shape of Llama, and random features for the linearised methods. "
        "Bare loops are the model's passes alone; megabytes are peaks over model and data, and for "
        "the linearised methods with their features. Exponents are least squares in logarithms.\n"
        f"{hardware_of(figures)}; {figures['seconds']:.0f} s in all."
    ]
    for against in dict.fromkeys(row["against"] for row in figures["rows"]):
        parts.append(f"Against the number of {against}:")
        of_series = [row for row in figures["rows"] if row["against"] == against]
        columns = [column for column in COLUMNS if any(column in row for row in of_series)]
        parts.append(table(sorted(of_series, key=lambda row: row["name"]), columns))
    return "\n\n".join(parts)


def _draw(rows: Sequence[Row], path: Path) -> None:
    kinds = list(dict.fromkeys(row["against"] for row in rows))
    figure = Figure(figsize=(3.4 * len(kinds), 3.2), layout="constrained")
    for panel, against in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        chosen = [row for row in rows if row["against"] == against]
        for name in dict.fromkeys(row["name"] for row in chosen):
            series = [row for row in chosen if row["name"] == name]
            sizes = [row["size"] for row in series]
            panel.plot(sizes, [row["seconds"] for row in series], marker="o", label=name)
            if "bare_seconds" in series[0]:
                bare = [row["bare_seconds"] for row in series]
                panel.plot(sizes, bare, linestyle="--", color="0.5", label=f"{name}, bare loop")
        panel.set(xscale="log", yscale="log", xlabel=against, ylabel="seconds")
        panel.legend(fontsize=6, frameon=False)
    save(figure, path)
