"""What every method costs: time and memory, by the width of the model."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import measuring
from benchmarks.measuring import Message
from benchmarks.methods import COSTS, posterior
from benchmarks.methods.method import Method, find_methods
from benchmarks.models import device_of
from benchmarks.options import Cost
from benchmarks.random_models import MEANING, Shape, random_llama, random_loader
from benchmarks.report import Figures, Result, Row, say, table

INTERMEDIATE_RATIO = 2.7
HEAD_SIZE = 64
# Larger batches take minutes, for wide models on a CPU and for rivals that hold the
# Jacobian of all weights; for the latter, gigabytes too.
LARGEST_BATCH = 8
WIDEST_WITH_LARGE_BATCHES = 1024
# The variances of logits; the bare loop is a forward pass then.
LEARNS = ("bare", "lowrank_kron")
PLACE = ("dtype", "hidden_size", "layers", "phase")
FIGURES = (
    "seconds_of_a_batch",
    "in_bare_loops",
    "peak_megabytes",
    "posterior_megabytes",
)


def run(options: Cost) -> Iterator[Result]:
    """Measure every method at every shape."""
    device = device_of(options.device)
    methods = find_methods(COSTS, options.contestants)
    measured: list[Row] = []
    failures: list[Row] = []
    for shape, batches in shapes_of(options, device):
        rows = []
        for method in methods:
            say(options, shape.hidden_size, shape.dtype, method.title)
            row = {
                "hidden_size": shape.hidden_size,
                "layers": shape.layers,
                "dtype": shape.dtype,
                "contestant": method.key,
                "name": method.title,
            }
            contest = Contest(method.key, shape, batches, options, device)
            for message in contest.messages():
                into = failures if message.kind == "failed" else rows
                into.append({**row, **message.content})
        _add_bare_loops(rows)
        measured += rows
    figures = {
        "weights": MEANING,
        "measurements": measured,
        "failures": failures,
        "growth": [_growth(measured, each) for each in methods if each.key != "bare"],
    }
    yield figures, text_of(figures, options)


def shapes_of(options: Cost, device: str) -> Iterator[tuple[Shape, int]]:
    """Yield each shape to measure, with the number of batches in its fits."""
    sizes = options.hidden_sizes
    layers = _for_each(options.layers, len(sizes))
    batches = _for_each(options.batches, len(sizes))
    on_cuda = torch.device(device).type == "cuda"
    for dtype in options.dtypes:
        for hidden_size, depth, count in zip(sizes, layers, batches, strict=True):
            is_extra = dtype != options.dtypes[0] and hidden_size != min(sizes)
            if is_extra and not on_cuda:
                continue
            shape = Shape(
                hidden_size=hidden_size,
                layers=depth,
                intermediate_size=round(INTERMEDIATE_RATIO * hidden_size),
                heads=1 if hidden_size % HEAD_SIZE else hidden_size // HEAD_SIZE,
                rank=options.rank,
                classes=options.classes,
                batch_size=options.batch_size,
                length=options.length,
                dtype=dtype,
            )
            yield shape, count


def _for_each(numbers: tuple[int, ...], models: int) -> tuple[int, ...]:
    """Return a number for each model, where one may be given for all."""
    if len(numbers) == 1:
        return numbers * models
    if len(numbers) != models:
        raise SystemExit(
            f"cost: give {models} numbers of layers and batches, or one of each"
        )
    return numbers


@dataclass(frozen=True)
class Contest:
    """One method at one shape, to be measured in a process of its own."""

    key: str
    shape: Shape
    batches: int  # of a fit
    options: Cost
    device: str

    @property
    def prediction_batch_sizes(self) -> list[int]:
        """List the batch sizes to predict with, as far as they take no minutes."""
        sizes = sorted(set(self.options.prediction_batch_sizes))
        holds_jacobian = self.key.startswith("stock")
        is_wide = self.shape.hidden_size > WIDEST_WITH_LARGE_BATCHES
        on_cuda = torch.device(self.device).type == "cuda"
        if holds_jacobian or (is_wide and not on_cuda):
            largest = max(LARGEST_BATCH, sizes[0])
            return [size for size in sizes if size <= largest]
        return sizes

    def messages(self) -> Iterator[Message]:
        """Measure; yield figures, and failures as messages of the kind "failed"."""
        messages, reason = measuring.run_limited(measure, (self,), self.options.limit)
        for message in messages:
            if message.kind != "ready":
                yield message
        if reason is not None:
            yield Message("failed", {"what": "stopped", "reason": reason})


def measure(contest: Contest) -> Iterator[Message]:
    """Make a model, fit and predict; yield the figures, or what failed and why."""
    shape, options, device = contest.shape, contest.options, contest.device
    measuring.set_up(options)
    # Libraries' warnings would come once for each process.
    logging.disable(logging.WARNING)
    model = random_llama(shape, device, options.seed)
    loader = random_loader(shape, contest.batches, device, options.seed)
    # What PyTorch loads during its first passes counts for no method.
    warm_up = posterior("bare").build(model)
    warm_up.fit(random_loader(shape, 1, device, options.seed, batch_size=1))
    megabytes_before = measuring.megabytes_in_use(device)
    measuring.limit_memory(device)
    yield Message("ready", None)

    la = posterior(contest.key).build(model)
    figures = measuring.time_and_memory(
        lambda: la.fit(loader), device, options.repetitions, options.limit
    )
    fit = {
        "phase": "fit",
        **figures,
        "batches": contest.batches,
        # What it keeps of the training data.
        "posterior_megabytes": measuring.megabytes_of(la.state_dict()["H"]),
    }
    yield Message("fit", fit)
    learns = contest.key in LEARNS
    if learns:
        la.amortize(loader)
    for size in contest.prediction_batch_sizes:
        yield _prediction(contest, la, "predict", "glm", size, megabytes_before)
    if learns:
        for size in contest.prediction_batch_sizes:
            yield _prediction(
                contest, la, "amortized", "amortized", size, megabytes_before
            )


def _prediction(
    contest: Contest,
    la: Any,
    name: str,
    pred_type: str,
    size: int,
    megabytes_before: float,
) -> Message:
    """Measure predictions of a batch; their memory includes the posterior's."""
    options, device = contest.options, contest.device
    # Other texts than those of the fit, of which a method might keep something.
    seed = options.seed + 1
    (batch,) = random_loader(contest.shape, 1, device, seed, batch_size=size)

    def predict() -> None:
        la(batch, pred_type=pred_type, link_approx="probit")

    phase = f"{name} {size}"
    try:
        held = measuring.megabytes_in_use(device) - megabytes_before
        figures = measuring.time_and_memory(
            predict, device, options.repetitions, options.limit
        )
    # Memory may be too small for this size, and enough for others.
    except Exception as error:
        return Message("failed", {"what": phase, "reason": measuring.reason_of(error)})
    figures["peak_megabytes"] += held
    return Message("predict", {"phase": phase, **figures, "batches": 1})


def _add_bare_loops(rows: Sequence[Row]) -> None:
    """Add to each row of one shape its time relative to that of the bare passes."""
    bare = {}
    for row in rows:
        if row["contestant"] == "bare":
            bare[row["phase"]] = row["median"]
    for row in rows:
        seconds = bare.get(row["phase"])
        row["in_bare_loops"] = row["median"] / seconds if seconds else None


def _growth(measured: Sequence[Row], method: Method) -> Row:
    """Fit how a fit's extra time, per batch and layer, grows with the width."""
    fits = [
        row
        for row in measured
        if row["contestant"] == method.key and row["phase"] == "fit"
    ]
    added = {}
    for row in fits:
        # Exponents are of one dtype, the first.
        if row["dtype"] == fits[0]["dtype"] and row["in_bare_loops"]:
            # What a fit takes beside the bare passes.
            share = 1 - 1 / row["in_bare_loops"]
            count = row["batches"] * row["layers"]
            added[row["hidden_size"]] = row["median"] * share / count
    sizes = list(added)
    seconds = list(added.values())
    return {
        "name": f"{method.title}, fit",
        "against": "hidden size",
        "sizes": sizes,
        "seconds": seconds,
        "exponent": measuring.growth_exponent(sizes, seconds),
    }


def text_of(figures: Figures, options: Cost) -> list[str]:
    """Put all figures in words and tables."""
    rows = []
    for row in sorted(figures["measurements"], key=_place):
        seconds = _spread(row, options.repetitions)
        rows.append({**row, "seconds_of_a_batch": seconds})
    parts = [
        "Random weights in the shape of Llama: they tell about shapes and speed only. "
        f"The batches of a fit have {options.batch_size} texts of {options.length} "
        f"tokens and {options.classes} classes.\nBare loops are the model's passes "
        f"alone. Seconds are medians of {options.repetitions} warm calls unless a "
        "number is given; megabytes are peaks over model and data.",
        table(rows, ["name", *PLACE, *FIGURES]),
    ]
    failures = [
        f"- {row['name']} ({row['hidden_size']}, {row['dtype']}), {row['what']}: "
        f"{row['reason']}"
        for row in figures["failures"]
    ]
    if failures:
        parts.append("\n".join(failures))
    parts += [
        "Growth of what a fit adds to the bare loop, for a batch and a layer: "
        "exponents of least squares in logarithms.",
        table(figures["growth"], ["name", "against", "sizes", "seconds", "exponent"]),
    ]
    return parts


def _place(row: Row) -> list[Any]:
    return [row[key] for key in PLACE]


def _spread(row: Row, repetitions: int) -> str:
    """Write a batch's median and range, and an unusual number of calls."""
    median = row["median"] / row["batches"]
    least = row["minimum"] / row["batches"]
    most = row["maximum"] / row["batches"]
    remarks = [f"{least:.3g} to {most:.3g}"]
    if row["repetitions"] != repetitions:
        remarks.append(f"; of {row['repetitions']}")
    if not row["warmed_up"]:
        remarks.append(", not warmed up")
    return f"{median:.3g} ({''.join(remarks)})"
