"""How time and memory grow with the number of classes, tokens and processes."""

import logging
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import laplace_lora_ext
from benchmarks import measuring, report
from benchmarks.measuring import Message
from benchmarks.methods import posterior
from benchmarks.methods.posteriors import lowrank_kron
from benchmarks.models import device_of
from benchmarks.options import Scale
from benchmarks.random_models import (
    MEANING,
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
        setting = Setting(replace(shape, classes=size), False, options, device)
        of_size = _measured(jobs_of_classes, setting)
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
            setting = Setting(
                replace(shape, length=size), is_checkpointed, options, device
            )
            of_size = _measured(jobs_of_length, setting)
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


@dataclass(frozen=True)
class Setting:
    """A model and its batches, to be measured in a process of its own."""

    shape: Shape
    is_checkpointed: bool
    options: Scale
    device: str


def _measured(
    jobs: Callable[[Setting], Iterator[Message]], setting: Setting
) -> list[Row]:
    """Measure jobs in a process of its own, whose memory is untouched."""
    messages, reason = measuring.run_limited(jobs, (setting,), setting.options.limit)
    if reason is not None:
        # There are some rows less, and the reason is shown.
        print(reason, file=sys.stderr)
    return [message.content for message in messages if message.kind == "job"]


def quiet(options: Scale) -> None:
    """Silence libraries' remarks, which each process would make."""
    measuring.set_up(options)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")


def jobs_of_classes(setting: Setting) -> Iterator[Message]:
    """Measure what depends on the number of classes."""
    jobs = Jobs(setting)
    yield Message("ready", None)
    yield jobs.measured(FORWARD, jobs.pass_forward)
    yield jobs.measured("fit", jobs.fit, of_all=True)
    yield jobs.measured("search", jobs.search, of_all=True)
    yield jobs.measured("exact prediction", jobs.predict_exactly)
    yield jobs.measured("prediction by contrasts", jobs.predict)
    yield jobs.measured("learning variances", jobs.amortize, of_all=True)
    yield jobs.measured("prediction by learnt variances", jobs.predict_by_learnt)


def jobs_of_length(setting: Setting) -> Iterator[Message]:
    """Measure what depends on the length of texts, and training."""
    jobs = Jobs(setting)
    yield Message("ready", None)
    yield jobs.measured(TRAINING, jobs.train)
    yield jobs.measured("fit", jobs.fit, of_all=True)
    yield jobs.measured("prediction", jobs.predict)


class Jobs:
    """What is measured of one model; jobs after `fit` need it done."""

    def __init__(self, setting: Setting) -> None:
        shape, options = setting.shape, setting.options
        quiet(options)
        self._device = setting.device
        self._options = options
        self._adapted = random_llama(shape, setting.device, options.seed)
        switch_checkpointing(self._adapted.model, setting.is_checkpointed)
        self._loader = random_loader(
            shape, options.batches, setting.device, options.seed
        )
        # Other texts than those of the fit.
        (self._batch,) = random_loader(shape, 1, setting.device, options.seed + 1)
        self._la = lowrank_kron(self._adapted)
        # What PyTorch loads during its first passes counts for no job.
        short = replace(shape, length=1, batch_size=1)
        self._la.fit(random_loader(short, 1, setting.device, options.seed))

    def measured(
        self, name: str, job: Callable[[], object], of_all: bool = False
    ) -> Message:
        """Measure a job of one batch, or of all batches of the fit."""
        options = self._options
        figures = measuring.time_and_memory(
            job, self._device, options.repetitions, options.limit
        )
        n_texts = options.batch_size * (options.batches if of_all else 1)
        row: Row = {
            "name": name,
            "seconds": figures["median"] / n_texts,
            "megabytes": figures["peak_megabytes"],
        }
        return Message("job", row)

    @torch.no_grad()
    def pass_forward(self) -> None:
        """Compute the model's own logits."""
        self._adapted.logits_model(self._batch)

    def train(self) -> None:
        """Take the passes of a training step."""
        model = self._adapted.model
        model.train()
        logits = self._adapted.logits_model(self._batch)
        nn.functional.cross_entropy(logits, self._batch["labels"]).backward()
        model.zero_grad()
        model.eval()

    def fit(self) -> None:
        """Fit the posterior."""
        self._la.fit(self._loader)

    def search(self) -> None:
        """Choose the prior precision by labels."""
        self._la.optimize_prior_precision(method="gridsearch", val_loader=self._loader)

    def predict(self) -> None:
        """Predict by the contrasts that matter."""
        self._la(self._batch, link_approx="mean_field")

    def predict_exactly(self) -> None:
        """Predict by the contrasts of all classes."""
        la = copy(self._la)
        la.n_contrasts = la.n_outputs - 1
        la(self._batch, link_approx="mean_field")

    def amortize(self) -> None:
        """Learn the variances."""
        self._la.amortize(self._loader, unlabelled=None)

    def predict_by_learnt(self) -> None:
        """Predict by learnt variances."""
        self._la(self._batch, pred_type="amortized", link_approx="mean_field")


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
        setting = Setting(wide, False, options, device)
        rows += [{"size": size, **row} for row in _measured(head_in_a_fit, setting)]
    return _by_name(rows)


def head_in_a_fit(setting: Setting) -> Iterator[Message]:
    """Compare fits with and without a classifier's head."""
    shape, options = setting.shape, setting.options
    quiet(options)
    model = random_classifier(shape, setting.device, options.seed).model
    loader = random_loader(shape, options.batches, setting.device, options.seed)
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
    """Fit the same texts with several processes on one machine's cores."""
    slowest = {}
    for key in PAIR:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(world) as pool:
            meeting = f"{folder}/meeting"
            shards = [
                Shard(key, shape, options, world, rank, meeting)
                for rank in range(world)
            ]
            # The processes wait for each other, so all of them have to run at once.
            alone = partial(measuring.run_alone, _fit_shard)
            rows = list(pool.map(alone, shards))
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
    model = random_llama(shard.shape, "cpu", options.seed)
    la = posterior(shard.key).build(model)
    # A first fit, while PyTorch loads its parts.
    with measuring.peak_memory("cpu") as memory:
        la.fit(part)
    times = []
    for _ in range(options.repetitions):
        # Who is early would count the time until the others begin.
        dist.barrier()
        times.append(measuring.seconds_of(partial(la.fit, part)))
    dist.destroy_process_group()
    return {"median": statistics.median(times), "peak_megabytes": memory.megabytes}


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
