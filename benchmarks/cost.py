"""What a posterior costs: time and memory against the width of the model, for every rival."""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.cost_report import cost_report, draw_costs
from benchmarks.growth import growth
from benchmarks.measuring import available_megabytes, growth_exponent, run_limited
from benchmarks.random_models import Shape, usual_heads
from benchmarks.report import describe_machine, package_versions, settings_of, write_figures
from benchmarks.rivals import NAMES, RIVALS, Trial, measure, needed_megabytes

INTERMEDIATE_RATIO = 2.7
VOCABULARY = 1000
HEADLINE_BATCH_SIZE = 8
WIDEST_WITH_LARGE_BATCHES = 1024


def cost(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark of costs.

    Parameters
    ----------
    arguments : argparse.Namespace
        Options of the command line.

    Returns
    -------
    figures : dict
        Everything that was measured, as in cost.json.

    Raises
    ------
    SystemExit
        If the options contradict each other or name an unknown contestant.
    """
    started = time.perf_counter()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    keys = arguments.contestants or list(RIVALS)
    unknown = [key for key in keys if key not in RIVALS]
    if unknown:
        raise SystemExit(f"cost: no contestant {', '.join(unknown)}; there are {', '.join(RIVALS)}")
    trials = _trials(arguments, device)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    arguments.output.mkdir(parents=True, exist_ok=True)

    shapes = []
    for trial in trials:
        rows = []
        for key in keys:
            if not arguments.quiet:
                shape = trial.shape
                print(f"{shape.hidden_size}, {shape.dtype}: {NAMES[key]}", file=sys.stderr)
            rows.append(_contest(key, trial, arguments.memory_limit))
        _add_ratios(rows)
        shapes.append(
            {
                **vars(trial.shape),
                "batches": trial.batches,
                "headline_batch_size": _headline(trial.prediction_batch_sizes),
                "contestants": rows,
            }
        )

    if not arguments.quiet:
        print("Growth of the library's own part", file=sys.stderr)
    figures = {
        "weights": "random: they stand for shapes and speed only",
        "settings": settings_of(arguments),
        "shapes": shapes,
        "fit_growth": _fit_growth(shapes, keys),
        "growth": growth(
            arguments.batch_size,
            arguments.length,
            arguments.classes,
            arguments.rank,
            device,
            arguments.repetitions,
            arguments.limit,
            tuple(arguments.growth_widths),
        ),
        "seconds": time.perf_counter() - started,
        "machine": {"device": device, **describe_machine(device)},
        "versions": package_versions(),
    }
    report = cost_report(figures)
    (arguments.output / "cost.md").write_text(report + "\n", encoding="utf-8")
    draw_costs(shapes, arguments.output / "cost.png")
    write_figures(figures, arguments.output / "cost.json")
    print(report)
    return figures


def _trials(arguments: argparse.Namespace, device: str) -> list[Trial]:
    """Every shape that is measured, with the batch sizes of its predictions."""
    sizes = arguments.hidden_sizes
    layers, batches = (
        numbers * len(sizes) if len(numbers) == 1 else numbers
        for numbers in (arguments.layers, arguments.batches)
    )
    if len(layers) != len(sizes) or len(batches) != len(sizes):
        raise SystemExit(f"cost: give {len(sizes)} numbers of layers and batches, or one of each")
    if arguments.classes < 2 or arguments.classes > VOCABULARY:
        raise SystemExit(f"cost: --classes must be from 2 to {VOCABULARY}")
    on_cuda = torch.device(device).type == "cuda"
    trials = []
    for number, dtype in enumerate(arguments.dtypes):
        for hidden_size, depth, count in zip(sizes, layers, batches, strict=True):
            if number > 0 and not on_cuda and hidden_size != min(sizes):
                continue
            batch_sizes = tuple(sorted(set(arguments.prediction_batch_sizes)))
            if hidden_size > WIDEST_WITH_LARGE_BATCHES and not on_cuda:
                largest = max(HEADLINE_BATCH_SIZE, batch_sizes[0])
                batch_sizes = tuple(size for size in batch_sizes if size <= largest)
            shape = Shape(
                hidden_size=hidden_size,
                layers=depth,
                intermediate_size=round(INTERMEDIATE_RATIO * hidden_size),
                heads=usual_heads(hidden_size),
                vocabulary=VOCABULARY,
                rank=arguments.rank,
                target_modules=("q_proj", "v_proj"),
                classes=arguments.classes,
                batch_size=arguments.batch_size,
                length=arguments.length,
                dtype=dtype,
            )
            trials.append(
                Trial(
                    shape=shape,
                    batches=count,
                    prediction_batch_sizes=batch_sizes,
                    repetitions=arguments.repetitions,
                    limit=arguments.limit,
                    device=device,
                    threads=arguments.threads,
                    seed=arguments.seed,
                )
            )
    return trials


def _headline(batch_sizes: Sequence[int]) -> int:
    """The batch size whose memory the table shows."""
    return HEADLINE_BATCH_SIZE if HEADLINE_BATCH_SIZE in batch_sizes else batch_sizes[0]


def _contest(key: str, trial: Trial, memory_limit: float | None) -> dict[str, Any]:
    """One contestant's figures for one shape, and what of it has failed."""
    row: dict[str, Any] = {
        "contestant": key,
        "name": NAMES[key],
        "fit": None,
        "posterior_megabytes": None,
        "predict": [],
        "failures": [],
    }
    needed, available = needed_megabytes(key, trial), memory_limit
    if available is None:
        available = available_megabytes(trial.device)
    if needed > available:
        reason = f"needs at least {needed:.4g} MB of memory where {available:.4g} MB are free"
        row["failures"].append({"what": "not run", "reason": reason})
        return row
    messages, reason = run_limited(measure, (key, trial), trial.limit, "benchmarks.rivals")
    for kind, content in messages:
        if kind == "fit":
            row["fit"] = {**content, "seconds_per_batch": content["median"] / content["batches"]}
        elif kind == "posterior":
            row["posterior_megabytes"] = content
        elif kind == "predict":
            row["predict"].append(content)
        elif kind == "failed":
            row["failures"].append({"what": content[0], "reason": content[1]})
    if reason is not None:
        row["failures"].append({"what": "stopped", "reason": reason})
    return row


def _add_ratios(rows: list[dict[str, Any]]) -> None:
    """Divide every time by that of the bare loop, where there is one."""
    bare = next((row for row in rows if row["contestant"] == "bare"), None)
    bare_fit = bare["fit"] if bare else None
    bare_predictions = {p["batch_size"]: p["median"] for p in bare["predict"]} if bare else {}
    for row in rows:
        if row["fit"]:
            row["fit"]["in_bare_loops"] = (
                row["fit"]["median"] / bare_fit["median"] if bare_fit else None
            )
        for prediction in row["predict"]:
            seconds = bare_predictions.get(prediction["batch_size"])
            prediction["in_bare_loops"] = prediction["median"] / seconds if seconds else None


def _fit_growth(shapes: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
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
                    "name": NAMES[key],
                    "hidden_sizes": list(added),
                    "added_seconds_per_batch_and_layer": list(added.values()),
                    "exponent": growth_exponent(list(added), list(added.values())),
                }
            )
    return series
