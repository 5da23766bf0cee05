"""What every method costs: time and memory, by the width of the model."""

import logging
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from benchmarks import measuring
from benchmarks.methods import METHODS, posterior
from benchmarks.models import device_of
from benchmarks.options import Cost
from benchmarks.random_models import MEANING, Shape, random_llama, random_loader
from benchmarks.report import Figures, Result, Row, draw_lines, lines, say, table

INTERMEDIATE_RATIO = 2.7
HEAD_SIZE = 64
# Larger batches take minutes, for wide models on a CPU and for rivals that hold the Jacobian of
# all weights; for the latter, gigabytes too.
LARGEST_BATCH = 8
WIDEST_WITH_LARGE_BATCHES = 1024
HEADLINE = "predict 8"  # the prediction that is drawn
LEARNS = ("bare", "lowrank_kron")  # the variances of logits; the bare loop is a forward pass then
PLACE = ("dtype", "hidden_size", "layers", "phase")
FIGURES = ("seconds_of_a_batch", "in_bare_loops", "peak_megabytes", "posterior_megabytes")


def run(options: Cost) -> Iterator[Result]:
    """Measure every method at every shape; then draw."""
    device = device_of(options.device)
    measured, failures = [], []
    for shape, batches in shapes_of(options, device):
        rows = []
        place = {"hidden_size": shape.hidden_size, "layers": shape.layers, "dtype": shape.dtype}
        for key in options.contestants:
            say(options, shape.hidden_size, shape.dtype, METHODS[key].title)
            row = {**place, "contestant": key, "name": METHODS[key].title}
            for kind, content in contest(key, shape, batches, options, device):
                (failures if kind == "failed" else rows).append({**row, **content})
        bare = {row["phase"]: row["median"] for row in rows if row["contestant"] == "bare"}
        for row in rows:
            seconds = bare.get(row["phase"])
            row["in_bare_loops"] = row["median"] / seconds if seconds else None
        measured += rows
    figures = {
        "weights": MEANING,
        "measurements": measured,
        "failures": failures,
        "growth": _growth(measured, options.contestants),
    }
    yield figures, text_of(figures, options)
    draw(measured, options.output / "cost.png")


def shapes_of(options: Cost, device: str) -> Iterator[tuple[Shape, int]]:
    """Each shape to measure, with the number of batches in its fits."""
    sizes = options.hidden_sizes
    if any(len(numbers) not in (1, len(sizes)) for numbers in (options.layers, options.batches)):
        raise SystemExit(f"cost: give {len(sizes)} numbers of layers and batches, or one of each")
    layers, batches = (
        numbers * len(sizes) if len(numbers) == 1 else numbers
        for numbers in (options.layers, options.batches)
    )
    for dtype in options.dtypes:
        for hidden_size, depth, count in zip(sizes, layers, batches, strict=True):
            is_extra = dtype != options.dtypes[0] and hidden_size != min(sizes)
            if is_extra and torch.device(device).type != "cuda":
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


def contest(
    key: str, shape: Shape, batches: int, options: Cost, device: str
) -> Iterator[measuring.Message]:
    """Measure one method at one shape, in a process of its own; failures have the kind "failed"."""
    sizes = sorted(set(options.prediction_batch_sizes))
    holds_jacobian = key.startswith("stock")
    is_wide = shape.hidden_size > WIDEST_WITH_LARGE_BATCHES
    if holds_jacobian or (is_wide and torch.device(device).type != "cuda"):
        sizes = [size for size in sizes if size <= max(LARGEST_BATCH, sizes[0])]
    arguments = (key, shape, batches, sizes, options, device)
    messages, reason = measuring.run_limited(measure, arguments, options.limit)
    yield from (message for message in messages if message[0] != "ready")
    if reason is not None:
        yield "failed", {"what": "stopped", "reason": reason}


def measure(
    key: str, shape: Shape, batches: int, sizes: Sequence[int], options: Cost, device: str
) -> Iterator[measuring.Message]:
    """Make a model, fit a method and predict; yield the figures, or what failed and why."""
    measuring.set_up(options)
    logging.disable(logging.WARNING)
    model = random_llama(shape, device, options.seed)
    loader = random_loader(shape, batches, device, options.seed)
    # What PyTorch loads during its first passes counts for no method.
    warm_up = posterior("bare").build(model)
    warm_up.fit(random_loader(shape, 1, device, options.seed, batch_size=1))
    before = measuring.megabytes_in_use(device)
    measuring.limit_memory(options.memory_limit, device)
    yield "ready", None

    la = posterior(key).build(model)
    limits = (device, options.repetitions, options.limit)
    figures = measuring.time_and_memory(lambda: la.fit(loader), *limits)
    parts = tree_leaves(la.state_dict()["H"])
    kept = sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))
    figures |= {"batches": batches, "posterior_megabytes": kept / measuring.BYTES_PER_MEGABYTE}
    yield "fit", {"phase": "fit", **figures}
    if key in LEARNS:
        la.amortize(loader)
    ways = {"predict": "glm", **({"amortized": "amortized"} if key in LEARNS else {})}
    for (way, pred_type), size in product(ways.items(), sizes):
        (batch,) = random_loader(shape, 1, device, options.seed + 1, size)

        def predict(batch: Any = batch, pred_type: str = pred_type) -> None:
            la(batch, pred_type=pred_type, link_approx="probit")

        phase = f"{way} {size}"
        try:
            held = measuring.megabytes_in_use(device) - before
            figures = measuring.time_and_memory(predict, *limits)
            figures["peak_megabytes"] += held
            yield "predict", {"phase": phase, **figures, "batches": 1}
        except Exception as error:
            yield "failed", {"what": phase, "reason": measuring.reason_of(error)}


def _growth(measured: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """How the time that a fit adds to the bare loop, per batch and layer, grows with the width."""
    series = []
    for key in (key for key in keys if key != "bare"):
        fits = [row for row in measured if row["contestant"] == key and row["phase"] == "fit"]
        added = {
            row["hidden_size"]: row["median"]
            * (1 - 1 / row["in_bare_loops"])
            / (row["batches"] * row["layers"])
            for row in fits
            if row["dtype"] == fits[0]["dtype"] and row["in_bare_loops"]
        }
        exponent = measuring.growth_exponent(list(added), list(added.values()))
        name = {"name": f"{METHODS[key].title}, fit", "against": "hidden size"}
        facts = {"sizes": list(added), "seconds": list(added.values()), "exponent": exponent}
        series.append({**name, **facts})
    return series


def text_of(figures: Figures, options: Cost) -> list[str]:
    """All figures in words and tables."""
    rows = [
        {**row, "seconds_of_a_batch": _spread(row, options.repetitions)}
        for row in sorted(figures["measurements"], key=lambda row: [row[key] for key in PLACE])
    ]
    failures = [
        f"- {row['name']} ({row['hidden_size']}, {row['dtype']}), {row['what']}: {row['reason']}"
        for row in figures["failures"]
    ]
    return [
        "Random weights in the shape of Llama: they tell about shapes and speed only. The batches "
        f"of a fit have {options.batch_size} texts of {options.length} tokens and "
        f"{options.classes} classes.\nBare loops are the model's passes alone. Seconds are medians "
        f"of {options.repetitions} warm calls unless a number is given; megabytes are peaks over "
        "model and data.",
        table(rows, ["name", *PLACE, *FIGURES]),
        *(["\n".join(failures)] if failures else []),
        "Growth of what a fit adds to the bare loop, for a batch and a layer: exponents of least "
        "squares in logarithms.",
        table(figures["growth"], ["name", "against", "sizes", "seconds", "exponent"]),
    ]


def _spread(row: Row, repetitions: int) -> str:
    """Median and range of a batch, and the number of calls where it is not the usual one."""
    median, least, most = (row[key] / row["batches"] for key in ("median", "minimum", "maximum"))
    text = f"{median:.3g} ({least:.3g} to {most:.3g}"
    if row["repetitions"] != repetitions:
        text += f"; of {row['repetitions']}"
    return text + (")" if row["warmed_up"] else ", not warmed up)")


def draw(measured: Sequence[Row], path: Path) -> None:
    """Draw time and memory against the hidden size for the first dtype, a line per method."""
    rows = [{**row, "seconds": row["median"] / row["batches"]} for row in measured]
    panels = {}
    for key, unit in (("seconds", "seconds a batch"), ("peak_megabytes", "MB over model and data")):
        for phase in ("fit", HEADLINE):
            shown = [
                row for row in rows if (row["phase"], row["dtype"]) == (phase, rows[0]["dtype"])
            ]
            panels[f"{phase}, {unit}"] = lines(shown, "hidden_size", key)
    draw_lines(path, panels, "Hidden size (random weights)", "log")
