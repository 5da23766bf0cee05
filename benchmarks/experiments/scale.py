"""How time and memory grow with the number of classes, tokens and processes."""

import logging
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import laplace_lora_ext
from benchmarks import measuring, report
from benchmarks.measuring import Message
from benchmarks.methods import posterior
from benchmarks.models import device_of
from benchmarks.options import Scale
from benchmarks.random_models import (
    MEANING,
    Jobs,
    Shape,
    random_classifier,
    random_llama,
    random_loader,
    switch_checkpointing,
)
from benchmarks.report import Result, Row

METHOD = "lowrank_kron"
PAIR = ("bare", METHOD)  # whose fits by several processes are compared
BATCHES_OF_PROCESSES = 4  # times those of other fits, to have some for each process
CLASSES_OF_OTHERS = 4  # where other sizes vary
LENGTH_OF_OTHERS = 64
FORWARD = "forward pass"
OF_ALL = ("fit", "search", "learning variances")  # take all batches, others one
TRAINING = "training step"


def run(options: Scale) -> Iterator[Result]:
    """Measure each series."""
    device = device_of(options.device)
    shape = Shape(
        hidden_size=options.hidden_size,
        layers=options.layers,
        intermediate_size=4 * options.hidden_size,
        classes=CLASSES_OF_OTHERS,
        batch_size=options.batch_size,
        length=LENGTH_OF_OTHERS,
        dtype=options.dtype,
    )
    parts = [
        f"Random weights in the shape of Llama: {options.layers} layers of width "
        f"{options.hidden_size} in {options.dtype}, {options.batch_size} texts in a "
        "batch. Seconds are for one text, and megabytes are peaks over what is in "
        "memory before: model, data and posterior. Exponents are least squares in "
        "logarithms."
    ]
    rows: list[Row] = []
    for name, explanation, of_series in _series(shape, options, device):
        parts += [explanation, report.table(of_series)]
        rows += [{"against": name, **row} for row in of_series]
        yield {"weights": MEANING, "rows": rows}, parts


def _series(
    shape: Shape, options: Scale, device: str
) -> Iterator[tuple[str, str, list[Row]]]:
    """Measure each series; yield its subject, an explanation, and rows."""
    if options.classes:
        explanation = (
            f"Against the number of classes, with {shape.length} tokens. A search "
            "tries a grid in one pass over the data; an exact prediction computes the "
            "contrasts of all classes, and one by contrasts those that matter:"
        )
        yield "classes", explanation, _by_classes(shape, options, device)
    if options.lengths:
        explanation = (
            "Against the number of tokens of a text, without and with gradient "
            f"checkpointing ({shape.classes} classes):"
        )
        yield "tokens of a text", explanation, _by_length(shape, options, device)
    if options.processes:
        explanation = (
            f"Against the number of processes, on a CPU ({shape.classes} classes, "
            f"{shape.length} tokens). Bare loops are the model's passes alone; seconds "
            "are for all texts:"
        )
        yield "processes", explanation, _by_processes(shape, options)
    if options.widths:
        explanation = (
            "Against the width, what a classifier's head adds to a fit "
            f"({shape.classes} classes, {shape.length} tokens). Fits with and without "
            "it are called in turn, and seconds are the least of each:"
        )
        yield "width", explanation, _by_width(shape, options, device)


def _by_classes(shape: Shape, options: Scale, device: str) -> list[Row]:
    """Measure each job, in forward passes."""
    rows: list[Row] = []
    for size in options.classes:
        report.say(options, size, "classes")
        with_classes = replace(shape, classes=size)
        of_size = _measured(jobs_of_classes, options, device, with_classes)
        seconds = _figure_of(of_size, FORWARD, "seconds")
        for row in of_size:
            row["forward_passes"] = _ratio(row["seconds"], seconds)
            rows.append({"size": size, **row})
    return _with_exponents(rows)


def _by_length(shape: Shape, options: Scale, device: str) -> list[Row]:
    """Measure each job's memory beside that of a training step."""
    rows: list[Row] = []
    for size in options.lengths:
        for is_checkpointed in (False, True):
            report.say(options, size, "tokens, checkpointed:", is_checkpointed)
            long = replace(shape, length=size)
            of_size = _measured(jobs_of_length, options, device, long, is_checkpointed)
            megabytes = _figure_of(of_size, TRAINING, "megabytes")
            for row in of_size:
                row["name"] += ", checkpointed" if is_checkpointed else ""
                row["of_a_training_step's_memory"] = _ratio(row["megabytes"], megabytes)
                rows.append({"size": size, **row})
    return _with_exponents(rows)


def _figure_of(rows: Sequence[Row], name: str, figure: str) -> float | None:
    """Look up a figure of one job, if it was measured."""
    figures = [row[figure] for row in rows if row["name"] == name]
    return figures[0] if figures else None


def _ratio(figure: float, unit: float | None) -> float | None:
    """Divide; None where there is no unit, or one too small to be seen."""
    if unit is None or unit <= 0:
        return None
    return figure / unit


def _by_name(rows: Sequence[Row]) -> list[Row]:
    """Put rows of one name together, and the name in front."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        name = row["name"]
        of_name = by_name.setdefault(name, [])
        # The name first: rows begin with a size, and tables with what it is of.
        of_name.append({"name": name, **row})
    return [row for of_name in by_name.values() for row in of_name]


def _measured(
    jobs: Callable[..., Iterator[Message]], options: Scale, *setting: Any
) -> list[Row]:
    """Measure jobs in a process of its own, whose memory is untouched."""
    arguments = (options, *setting)
    messages, reason = measuring.run_limited(jobs, arguments, options.limit)
    if reason is not None:
        # There are some rows less, and the reason is shown.
        print(reason, file=sys.stderr)
    return [message.content for message in messages if message.kind == "job"]


def quiet(options: Scale) -> None:
    """Silence libraries' remarks, which each process would make."""
    measuring.set_up(options)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")


def jobs_of_classes(options: Scale, device: str, shape: Shape) -> Iterator[Message]:
    """Measure what depends on the number of classes."""
    jobs = _jobs_of(options, device, shape)
    of_classes = {
        FORWARD: jobs.forward,
        "fit": jobs.fit,
        "search": jobs.search,
        "exact prediction": jobs.predict_exactly,
        "prediction by contrasts": jobs.predict,
        "learning variances": jobs.amortize,
        "prediction by learnt variances": jobs.predict_by_learnt,
    }
    yield from _each(of_classes, options, device)


def jobs_of_length(
    options: Scale, device: str, shape: Shape, is_checkpointed: bool
) -> Iterator[Message]:
    """Measure what depends on the length of texts, and training."""
    jobs = _jobs_of(options, device, shape, is_checkpointed)
    of_length = {TRAINING: jobs.train, "fit": jobs.fit, "prediction": jobs.predict}
    yield from _each(of_length, options, device)


def _jobs_of(
    options: Scale, device: str, shape: Shape, is_checkpointed: bool = False
) -> Jobs:
    quiet(options)
    adapted = random_llama(shape, device, options.seed)
    switch_checkpointing(adapted.model, is_checkpointed)
    batches = random_loader(shape, options.batches, device, options.seed)
    # Other texts than those of the fit.
    (batch,) = random_loader(shape, 1, device, options.seed + 1)
    jobs = Jobs(adapted, batches, batch)
    # What PyTorch loads during its first passes counts for no job.
    short = replace(shape, length=1, batch_size=1)
    jobs.la.fit(random_loader(short, 1, device, options.seed))
    return jobs


def _each(
    jobs: Mapping[str, Callable[[], object]], options: Scale, device: str
) -> Iterator[Message]:
    """Measure jobs, each for one text."""
    yield Message("ready", None)
    for name, job in jobs.items():
        figures = measuring.time_and_memory(
            job, device, options.repetitions, options.limit
        )
        n_batches = options.batches if name in OF_ALL else 1
        row: Row = {
            "name": name,
            "seconds": figures["median"] / (options.batch_size * n_batches),
            "megabytes": figures["peak_megabytes"],
        }
        yield Message("job", row)


def _by_processes(shape: Shape, options: Scale) -> list[Row]:
    """Measure fits that several processes share."""
    rows = []
    for size in options.processes:
        report.say(options, size, "processes")
        rows.append(_measure_processes(shape, size, options))
    return _with_exponents(rows)


def _by_width(shape: Shape, options: Scale, device: str) -> list[Row]:
    """Measure what a head adds to a fit."""
    rows: list[Row] = []
    for size in options.widths:
        report.say(options, size, "wide")
        wide = replace(shape, hidden_size=size, intermediate_size=4 * size)
        of_size = _measured(head_in_a_fit, options, device, wide)
        rows += [{"size": size, **row} for row in of_size]
    return _by_name(rows)


def head_in_a_fit(options: Scale, device: str, shape: Shape) -> Iterator[Message]:
    """Compare fits with and without a classifier's head."""
    quiet(options)
    model = random_classifier(shape, device, options.seed).model
    loader = random_loader(shape, options.batches, device, options.seed)
    without = laplace_lora_ext.Laplace(model)
    with_head = laplace_lora_ext.Laplace(model, modules_to_save=True)
    yield Message("ready", None)
    for la in (without, with_head):  # a first call of each is slower
        la.fit(loader)
    # In turn: what disturbs the machine for a while disturbs both.
    seconds = [
        [measuring.seconds_of(partial(la.fit, loader)) for la in (without, with_head)]
        for _ in range(options.repetitions)
    ]
    least, least_with = (min(of_fit) for of_fit in zip(*seconds, strict=True))
    row: Row = {
        "name": "head in a fit",
        "seconds": least_with,
        "seconds_without": least,
        "ratio": least_with / least,
    }
    yield Message("job", row)


def _measure_processes(shape: Shape, world: int, options: Scale) -> Row:
    """Fit the same texts with several processes on one machine's cores."""
    slowest = {}
    for key in PAIR:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(world) as pool:
            meeting = f"{folder}/meeting"
            part = partial(_measured, _fit_part, options, key, shape, world, meeting)
            # The processes wait for each other, so all of them have to run at once.
            rows = [row for of_rank in pool.map(part, range(world)) for row in of_rank]
        if len(rows) < world:
            raise SystemExit("scale: a process of the fit has ended without a figure.")
        # All wait for the last one, and every one needs its memory.
        slowest[key] = {
            "median": max(row["median"] for row in rows),
            "peak_megabytes": max(row["peak_megabytes"] for row in rows),
        }
    bare, ours = slowest["bare"], slowest[METHOD]
    return {
        "name": "fit",
        "size": world,
        "seconds": ours["median"],
        "bare_seconds": bare["median"],
        "in_bare_loops": ours["median"] / bare["median"],
        "megabytes": ours["peak_megabytes"],
        "bare_megabytes": bare["peak_megabytes"],
    }


def _fit_part(
    options: Scale, key: str, shape: Shape, world: int, meeting: str, rank: int
) -> Iterator[Message]:
    """Fit one process's part, together with the others, which find it by a file."""
    # Several processes' threads would wait for the same cores.
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world
    )
    batches = BATCHES_OF_PROCESSES * options.batches
    whole = random_loader(shape, batches, "cpu", options.seed)
    part = DataLoader(
        whole.dataset,
        batch_size=shape.batch_size,
        sampler=DistributedSampler(whole.dataset, shuffle=False),
        collate_fn=whole.collate_fn,
    )
    model = random_llama(shape, "cpu", options.seed)
    la = posterior(key).build(model)
    # A first fit, while PyTorch loads its parts.
    with measuring.peak_memory("cpu") as memory:
        la.fit(part)
    times = []
    for _ in range(options.repetitions):
        # Who is early would count the time until the others begin.
        dist.barrier()
        times.append(measuring.seconds_of(partial(la.fit, part)))
    dist.destroy_process_group()
    row: Row = {"median": statistics.median(times), "peak_megabytes": memory.megabytes}
    yield Message("job", row)


def _with_exponents(rows: Sequence[Row]) -> list[Row]:
    """Put rows of one name together, and exponents into the last row of each."""
    ordered = _by_name(rows)
    for name in {row["name"] for row in ordered}:
        of_name = [row for row in ordered if row["name"] == name]
        sizes = [row["size"] for row in of_name]
        seconds = [row["seconds"] for row in of_name]
        megabytes = [row["megabytes"] for row in of_name]
        of_name[-1]["time_exponent"] = measuring.growth_exponent(sizes, seconds)
        of_name[-1]["memory_exponent"] = measuring.growth_exponent(sizes, megabytes)
    return ordered
