"""What a posterior costs: time and memory against the width of the model, for every rival."""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields

import torch

from benchmarks.experiments.contest import Trial, contest
from benchmarks.experiments.cost_report import draw_costs, text_of
from benchmarks.experiments.growth import growth
from benchmarks.fine_tuning import device_of
from benchmarks.measuring import growth_exponent
from benchmarks.methods import METHODS
from benchmarks.options import Cost
from benchmarks.random_models import MEANING, Shape, usual_heads
from benchmarks.report import Figures, Row, provenance, write

CONTESTANTS = next(field.default for field in fields(Cost) if field.name == "contestants")
INTERMEDIATE_RATIO = 2.7
VOCABULARY = 1000
HEADLINE_BATCH_SIZE = 8
WIDEST_WITH_LARGE_BATCHES = 1024


def run(options: Cost) -> Figures:
    """Measure every method at every shape, and write tables, figures and plot."""
    started = time.perf_counter()
    device = device_of(options)
    unknown = [key for key in options.contestants if key not in CONTESTANTS]
    if unknown:
        known = ", ".join(CONTESTANTS)
        raise SystemExit(f"cost: no contestant {', '.join(unknown)}; there are {known}")
    trials = trials_of(options, device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    options.output.mkdir(parents=True, exist_ok=True)

    shapes = []
    for trial in trials:
        rows = []
        for key in options.contestants:
            if not options.quiet:
                shape = trial.shape
                text = f"{shape.hidden_size}, {shape.dtype}: {METHODS[key].title}"
                print(text, file=sys.stderr)
            rows.append(contest(key, trial, options.memory_limit))
        _add_ratios(rows)
        sizes = trial.prediction_batch_sizes
        shapes.append(
            {
                **asdict(trial.shape),
                "batches": trial.batches,
                # The batch size whose memory the table shows.
                "headline_batch_size": HEADLINE_BATCH_SIZE
                if HEADLINE_BATCH_SIZE in sizes
                else sizes[0],
                "contestants": rows,
            }
        )

    if not options.quiet:
        print("Growth of the library's own part", file=sys.stderr)
    figures = {
        "weights": MEANING,
        **provenance(options, device),
        "shapes": shapes,
        "fit_growth": _fit_growth(shapes, options.contestants),
        "growth": growth(options, device),
        "seconds": time.perf_counter() - started,
    }
    draw_costs(shapes, options.output / "cost.png")
    write(options.output, "cost", figures, text_of(figures))
    return figures


def trials_of(options: Cost, device: str) -> list[Trial]:
    """Every shape that is measured, with the batch sizes of its predictions."""
    sizes = options.hidden_sizes
    layers, batches = (
        list(numbers) * len(sizes) if len(numbers) == 1 else numbers
        for numbers in (options.layers, options.batches)
    )
    if len(layers) != len(sizes) or len(batches) != len(sizes):
        raise SystemExit(f"cost: give {len(sizes)} numbers of layers and batches, or one of each")
    if options.classes < 2 or options.classes > VOCABULARY:
        raise SystemExit(f"cost: --classes must be from 2 to {VOCABULARY}")
    on_cuda = torch.device(device).type == "cuda"
    trials = []
    for number, dtype in enumerate(options.dtypes):
        for hidden_size, depth, count in zip(sizes, layers, batches, strict=True):
            if number > 0 and not on_cuda and hidden_size != min(sizes):
                continue
            batch_sizes = tuple(sorted(set(options.prediction_batch_sizes)))
            if hidden_size > WIDEST_WITH_LARGE_BATCHES and not on_cuda:
                largest = max(HEADLINE_BATCH_SIZE, batch_sizes[0])
                batch_sizes = tuple(size for size in batch_sizes if size <= largest)
            shape = Shape(
                hidden_size=hidden_size,
                layers=depth,
                intermediate_size=round(INTERMEDIATE_RATIO * hidden_size),
                heads=usual_heads(hidden_size),
                vocabulary=VOCABULARY,
                rank=options.rank,
                target_modules=("q_proj", "v_proj"),
                classes=options.classes,
                batch_size=options.batch_size,
                length=options.length,
                dtype=dtype,
            )
            trials.append(
                Trial(
                    shape,
                    count,
                    batch_sizes,
                    options.repetitions,
                    options.limit,
                    device,
                    options.threads,
                    options.seed,
                )
            )
    return trials


def _add_ratios(rows: list[Row]) -> None:
    """Divide every time by that of the bare loop, where there is one."""
    bare = next((row for row in rows if row["contestant"] == "bare"), {"fit": None, "predict": []})
    bare_fit = bare["fit"]
    bare_predictions = {p["batch_size"]: p["median"] for p in bare["predict"]}
    for row in rows:
        if row["fit"]:
            row["fit"]["in_bare_loops"] = (
                row["fit"]["median"] / bare_fit["median"] if bare_fit else None
            )
        for prediction in row["predict"]:
            seconds = bare_predictions.get(prediction["batch_size"])
            prediction["in_bare_loops"] = prediction["median"] / seconds if seconds else None


def _fit_growth(shapes: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """How what a fit adds to the bare loop grows with the hidden size.

    The times are divided by the number of layers, of which wide models have fewer.
    """
    series = []
    first_dtype = shapes[0]["dtype"]
    for key in keys:
        added: dict[int, float] = {}
        for shape in shapes:
            fits = {row["contestant"]: row["fit"] for row in shape["contestants"]}
            if shape["dtype"] == first_dtype and fits.get(key) and fits.get("bare"):
                difference = fits[key]["seconds_per_batch"] - fits["bare"]["seconds_per_batch"]
                added[shape["hidden_size"]] = difference / shape["layers"]
        if key != "bare":
            series.append(
                {
                    "contestant": key,
                    "name": METHODS[key].title,
                    "hidden_sizes": list(added),
                    "added_seconds_per_batch_and_layer": list(added.values()),
                    "exponent": growth_exponent(list(added), list(added.values())),
                }
            )
    return series
