"""What a posterior costs: time and memory against the width of the model, for every rival."""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch

from benchmarks.experiments.contest import contest
from benchmarks.experiments.cost_report import draw_costs, text_of
from benchmarks.experiments.growth import growth
from benchmarks.measuring import growth_exponent, set_up
from benchmarks.methods import METHODS
from benchmarks.models import device_of
from benchmarks.options import CONTESTANTS, Cost
from benchmarks.random_models import MEANING, Shape
from benchmarks.report import Figures, Row, provenance, write

INTERMEDIATE_RATIO = 2.7
VOCABULARY = 1000
HEAD_SIZE = 64
HEADLINE_BATCH_SIZE = 8
WIDEST_WITH_LARGE_BATCHES = 1024


def run(options: Cost) -> Figures:
    """Measure every method at every shape, and write tables, figures and plot."""
    started = time.perf_counter()
    device = device_of(options.device)
    _refuse(options)
    set_up(options)
    shapes = []
    for shape, batches in shapes_of(options, device):
        sizes = sorted(set(options.prediction_batch_sizes))
        on_cuda = torch.device(device).type == "cuda"
        if shape.hidden_size > WIDEST_WITH_LARGE_BATCHES and not on_cuda:
            sizes = [size for size in sizes if size <= max(HEADLINE_BATCH_SIZE, sizes[0])]
        rows = []
        for key in options.contestants:
            if not options.quiet:
                text = f"{shape.hidden_size}, {shape.dtype}: {METHODS[key].title}"
                print(text, file=sys.stderr)
            rows.append(contest(key, shape, batches, sizes, options, device))
        _add_ratios(rows)
        # The batch size whose memory the table shows.
        headline = HEADLINE_BATCH_SIZE if HEADLINE_BATCH_SIZE in sizes else sizes[0]
        facts = {"batches": batches, "headline_batch_size": headline, "contestants": rows}
        shapes.append({**asdict(shape), **facts})

    figures = {
        "weights": MEANING,
        **provenance(options, device),
        "shapes": shapes,
        "fit_growth": _fit_growth(shapes, options.contestants),
        "growth": growth(options, device),
        "seconds": time.perf_counter() - started,
    }
    write(options.output, "cost", figures, text_of(figures))
    draw_costs(shapes, options.output / "cost.png")
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
                vocabulary=VOCABULARY,
                rank=options.rank,
                target_modules=("q_proj", "v_proj"),
                classes=options.classes,
                batch_size=options.batch_size,
                length=options.length,
                dtype=dtype,
            )
            yield shape, count


def _add_ratios(rows: list[Row]) -> None:
    """Divide every time by that of the bare loop, where there is one."""

    def parts(row: Row) -> Iterator[tuple[int, Row]]:
        """Figures of a fit and of predictions by their batch sizes, where there are any."""
        yield from ((0, fit) for fit in (row["fit"],) if fit)
        yield from ((prediction["batch_size"], prediction) for prediction in row["predict"])

    bare = {
        size: part["median"]
        for row in rows
        if row["contestant"] == "bare"
        for size, part in parts(row)
    }
    for row in rows:
        for size, part in parts(row):
            part["in_bare_loops"] = part["median"] / bare[size] if size in bare else None


def _fit_growth(shapes: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """How what a fit adds to the bare loop grows with the hidden size.

    The times are divided by the number of layers, of which wide models have fewer.
    """
    series = []
    for key in keys:
        added: dict[int, float] = {}
        for shape in shapes:
            fits = {row["contestant"]: row["fit"] for row in shape["contestants"]}
            if shape["dtype"] == shapes[0]["dtype"] and fits.get(key) and fits.get("bare"):
                difference = fits[key]["seconds_per_batch"] - fits["bare"]["seconds_per_batch"]
                added[shape["hidden_size"]] = difference / shape["layers"]
        sizes, seconds = list(added), list(added.values())
        facts = {"hidden_sizes": sizes, "added_seconds_per_batch_and_layer": seconds}
        name = {"contestant": key, "name": METHODS[key].title}
        series.append({**name, **facts, "exponent": growth_exponent(sizes, seconds)})
    return [row for row in series if row["contestant"] != "bare"]
