"""What a posterior costs: time and memory against the width of the model, for every rival."""

import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks import measuring
from benchmarks.experiments.cost_report import draw_costs, text_of
from benchmarks.experiments.growth import growth
from benchmarks.methods import METHODS, posterior
from benchmarks.models import device_of
from benchmarks.options import CONTESTANTS, Cost
from benchmarks.random_models import MEANING, Shape, random_llama, random_loader
from benchmarks.report import Figures, Row, provenance, write

INTERMEDIATE_RATIO = 2.7
VOCABULARY = 1000
HEAD_SIZE = 64
LARGEST_BATCH_OF_WIDE_MODELS = 8  # on a CPU, for those wider than
WIDEST_WITH_LARGE_BATCHES = 1024
# Rivals that hold the Jacobian of all weights take minutes and gigabytes for more.
LARGEST_BATCH_OF_JACOBIANS = 8

Message = tuple[str, Row]  # a kind, and figures


def run(options: Cost) -> Figures:
    """Measure every method at every shape, and write tables, figures and plot."""
    started = time.perf_counter()
    device = device_of(options.device)
    _refuse(options)
    measuring.set_up(options)
    measured, failures = [], []
    for shape, batches in shapes_of(options, device):
        rows = []
        place = {"hidden_size": shape.hidden_size, "layers": shape.layers, "dtype": shape.dtype}
        for key in options.contestants:
            if not options.quiet:
                print(shape.hidden_size, shape.dtype, METHODS[key].title, file=sys.stderr)
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
        **provenance(options, device),
        "measurements": measured,
        "failures": failures,
        "growth": [*_fit_growth(measured, options.contestants), *growth(options, device)],
        "seconds": time.perf_counter() - started,
    }
    write(options.output, "cost", figures, text_of(figures))
    draw_costs(measured, options.output / "cost.png")
    return figures


def _refuse(options: Cost) -> None:
    """End with one line where options contradict each other or name an unknown contestant."""
    unknown = [key for key in options.contestants if key not in CONTESTANTS]
    count = len(options.hidden_sizes)
    if unknown:
        known = ", ".join(CONTESTANTS)
        raise SystemExit(f"cost: no contestant {', '.join(unknown)}; there are {known}")
    if any(len(numbers) not in (1, count) for numbers in (options.layers, options.batches)):
        raise SystemExit(f"cost: give {count} numbers of layers and batches, or one of each")
    if options.classes < 2 or options.classes > VOCABULARY:
        raise SystemExit(f"cost: --classes must be from 2 to {VOCABULARY}")


def shapes_of(options: Cost, device: str) -> Iterator[tuple[Shape, int]]:
    """Every shape that is measured, with the number of batches of its fits."""
    sizes = options.hidden_sizes
    layers, batches = (
        list(numbers) * (len(sizes) if len(numbers) == 1 else 1)
        for numbers in (options.layers, options.batches)
    )
    shared: dict[str, Any] = {"vocabulary": VOCABULARY, "target_modules": ("q_proj", "v_proj")}
    shared |= {name: getattr(options, name) for name in ("rank", "classes", "batch_size", "length")}
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
                dtype=dtype,
                **shared,
            )
            yield shape, count


def contest(key: str, shape: Shape, batches: int, options: Cost, device: str) -> Iterator[Message]:
    """Figures of a method's phases at one shape, in a process of its own; and "failed" ones."""
    sizes = sorted(set(options.prediction_batch_sizes))
    limits = [LARGEST_BATCH_OF_JACOBIANS] if _holds_jacobian(key) else []
    if shape.hidden_size > WIDEST_WITH_LARGE_BATCHES and torch.device(device).type != "cuda":
        limits.append(LARGEST_BATCH_OF_WIDE_MODELS)
    sizes = [size for size in sizes if all(size <= max(limit, sizes[0]) for limit in limits)]
    arguments = (key, shape, batches, sizes, options, device)
    messages, reason = measuring.run_limited(measure, arguments, options.limit)
    yield from (message for message in messages if message[0] != "ready")
    if reason is not None:
        yield "failed", {"what": "stopped", "reason": reason}


def measure(
    send: measuring.Send,
    key: str,
    shape: Shape,
    batches: int,
    sizes: Sequence[int],
    options: Cost,
    device: str,
) -> None:
    """Make a model, fit a method to it and predict; send figures, or what has failed and why."""
    measuring.set_up(options)
    logging.disable(logging.WARNING)
    model = random_llama(shape, device, options.seed)
    loader = random_loader(shape, batches, device, options.seed)
    # What PyTorch loads and keeps at the first passes is no rival's own.
    warm_up = posterior("bare").build(model)
    warm_up.fit(random_loader(shape, 1, device, options.seed, batch_size=1))
    before = measuring.megabytes_in_use(device)
    measuring.limit_memory(options.memory_limit, device)
    send("ready", None)

    la = posterior(key).build(model)
    limits = (device, options.repetitions, options.limit)
    figures = measuring.time_and_memory(lambda: la.fit(loader), *limits)
    kept = _bytes_of(la.state_dict()["H"]) / measuring.BYTES_PER_MEGABYTE
    send("fit", {"phase": "fit", **figures, "batches": batches, "posterior_megabytes": kept})
    for size in sizes:
        (batch,) = random_loader(shape, 1, device, options.seed + 1, size)

        def predict(batch: Any = batch) -> None:
            la(batch, pred_type="glm", link_approx="probit")

        phase = f"predict {size}"
        try:
            held = measuring.megabytes_in_use(device) - before
            figures = measuring.time_and_memory(predict, *limits)
            figures["peak_megabytes"] += held
            send("predict", {"phase": phase, **figures, "batches": 1})
        except Exception as error:
            send("failed", {"what": phase, "reason": measuring.reason_of(error)})


def _holds_jacobian(key: str) -> bool:
    return key.startswith("stock") or key == "bayesian_lora"


def _bytes_of(content: Any) -> int:
    """Bytes of all tensors in a nest of mappings and sequences."""
    if isinstance(content, torch.Tensor):
        return content.nbytes
    parts = content.values() if isinstance(content, Mapping) else content
    return sum(map(_bytes_of, parts)) if isinstance(content, (Mapping, list, tuple)) else 0


def _fit_growth(measured: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """How what a fit adds to the bare loop, for a batch and a layer, grows with the hidden size."""
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
