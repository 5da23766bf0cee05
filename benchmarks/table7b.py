"""The paper's table of costs: LoRA training against LoRA training plus a Laplace fit."""

import argparse
import sys
import time
from typing import Any

import torch
from laplace import Laplace
from peft import PeftModel
from torch.nn.functional import cross_entropy

import laplace_lora_ext  # noqa: F401 - registers the class that Laplace is asked for
from benchmarks.measuring import (
    Send,
    megabytes_in_use,
    repeated_seconds,
    run_limited,
    seconds_of,
)
from benchmarks.memory import PeakMemory
from benchmarks.random_models import Shape, lora_weights, random_llama, random_loader
from benchmarks.report import (
    describe_machine,
    markdown_table,
    package_versions,
    settings_of,
    write_figures,
)
from laplace_lora_ext.models.logits_model import LogitsModel

STEPS_OF_TRAINING = 10_000
LEARNING_RATE = 5e-5
LARGEST_ON_A_CPU = 100_000_000
MEGABYTES_PER_GIGABYTE = 1e3
PAPER_TIME = "about 1 %"
PAPER_MEMORY = "1 to 5 %"
COLUMNS = (
    ("classes", "Classes", "{}"),
    ("step_seconds", "Training step (s)", "{:.4g}"),
    ("training_seconds", f"{STEPS_OF_TRAINING:,} steps (s)", "{:.4g}"),
    ("fit_seconds", "Laplace fit (s)", "{:.4g}"),
    ("fit_seconds_per_batch", "a batch (s)", "{:.4g}"),
    ("time_overhead_percent", "Time, overhead (%)", "{:.2f}"),
    ("paper_time", "the paper's", "{}"),
    ("training_gigabytes", "Training (GB)", "{:.4g}"),
    ("with_laplace_gigabytes", "+ Laplace (GB)", "{:.4g}"),
    ("memory_overhead_percent", "Memory, overhead (%)", "{:.2f}"),
    ("paper_memory", "the paper's", "{}"),
)


def table7b(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the table.

    Parameters
    ----------
    arguments : argparse.Namespace
        Options of the command line.

    Returns
    -------
    figures : dict
        Everything that was measured, as in table7b.json.

    Raises
    ------
    SystemExit
        If there is no GPU for a shape that needs one, or the options contradict each other.
    """
    shapes = [_shape(arguments, classes) for classes in arguments.classes]
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    _refuse(arguments, shapes[0], device)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    arguments.output.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    rows = []
    for shape in shapes:
        if not arguments.quiet:
            print(f"{shape.classes} classes", file=sys.stderr)
        rows.append(_row_alone(arguments, shape, device))
    figures = {
        "weights": "random: they stand for shapes and speed only",
        "settings": settings_of(arguments),
        "number_of_weights": shapes[0].number_of_weights,
        "rows": rows,
        "seconds": time.perf_counter() - started,
        "machine": {"device": device, **describe_machine(device)},
        "versions": package_versions(),
    }
    report = _summary(figures) + "\n\n" + markdown_table(rows, COLUMNS)
    (arguments.output / "table7b.md").write_text(report + "\n", encoding="utf-8")
    write_figures(figures, arguments.output / "table7b.json")
    print(report)
    return figures


def _shape(arguments: argparse.Namespace, classes: int) -> Shape:
    return Shape(
        hidden_size=arguments.hidden_size,
        layers=arguments.layers,
        intermediate_size=arguments.intermediate_size,
        heads=arguments.heads,
        vocabulary=arguments.vocabulary,
        rank=arguments.rank,
        target_modules=("q_proj", "v_proj", "lm_head"),
        classes=classes,
        batch_size=arguments.batch_size,
        length=arguments.length,
        dtype=arguments.dtype,
    )


def _refuse(arguments: argparse.Namespace, shape: Shape, device: str) -> None:
    """End with one line where the run could not be what it is meant to be."""
    if not all(2 <= classes <= shape.vocabulary for classes in arguments.classes):
        raise SystemExit(f"table7b: --classes must be from 2 to {shape.vocabulary}")
    if shape.hidden_size % shape.heads:
        raise SystemExit(f"table7b: {shape.heads} heads do not divide {shape.hidden_size}")
    if torch.device(device).type == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit(f"table7b: there is no CUDA device for --device {device}")
    elif arguments.device is None or shape.number_of_weights > LARGEST_ON_A_CPU:
        raise SystemExit(
            f"table7b: a model of {shape.number_of_weights / 1e9:.2g} billion weights needs a "
            "GPU, and none is in use; on a CPU give --device cpu with a small shape (at most "
            f"{LARGEST_ON_A_CPU / 1e9:g} billion weights, see --hidden-size and --layers)"
        )


def _row_alone(arguments: argparse.Namespace, shape: Shape, device: str) -> dict[str, Any]:
    """Measure a row in a process of its own, whose memory no other row has touched."""
    options = {key: value for key, value in vars(arguments).items() if key != "run"}
    messages, reason = run_limited(
        measure_row,
        (argparse.Namespace(**options), shape, device),
        limit=None,
        preload="benchmarks.table7b",
    )
    if reason is not None:
        raise SystemExit(f"table7b: {shape.classes} classes: {reason}")
    ((_, row),) = messages
    return row


def measure_row(send: Send, arguments: argparse.Namespace, shape: Shape, device: str) -> None:
    """Train for some steps, then fit, and measure both.

    Parameters
    ----------
    send : callable
        Takes "row" and the row's figures.
    arguments : argparse.Namespace
        Options of the command line.
    shape : Shape
        Sizes of the model and its batches.
    device : str
        Where to train and fit.
    """
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    before = megabytes_in_use(device)
    with PeakMemory(device) as training:
        model = random_llama(shape, device, arguments.seed)
        steps = _train(arguments, shape, model, device)
    # A fit comes after training, when gradients and the optimiser's state are gone.
    for weight in lora_weights(model):
        weight.grad = None
    # The first batch loads what the device computes with, as the first training step does.
    _laplace(model, shape).fit(random_loader(shape, 1, device, arguments.seed + 1))
    held = megabytes_in_use(device) - before
    la = _laplace(model, shape)
    loader = random_loader(shape, arguments.batches, device, arguments.seed)
    with PeakMemory(device) as fitting:
        fit_seconds = seconds_of(lambda: la.fit(loader, progress_bar=not arguments.quiet), device)
    training_seconds = STEPS_OF_TRAINING * steps["median"]
    fit_megabytes = held + fitting.megabytes
    both = max(training.megabytes, fit_megabytes)
    row = {
        "classes": shape.classes,
        "step": steps,
        "step_seconds": steps["median"],
        "training_seconds": training_seconds,
        "fit_seconds": fit_seconds,
        "fit_seconds_per_batch": fit_seconds / arguments.batches,
        "time_overhead_percent": 100 * fit_seconds / training_seconds,
        "paper_time": PAPER_TIME,
        "training_gigabytes": training.megabytes / MEGABYTES_PER_GIGABYTE,
        "fit_gigabytes": fit_megabytes / MEGABYTES_PER_GIGABYTE,
        "with_laplace_gigabytes": both / MEGABYTES_PER_GIGABYTE,
        "memory_overhead_percent": 100 * (both / training.megabytes - 1),
        "paper_memory": PAPER_MEMORY,
    }
    send("row", row)


def _laplace(model: PeftModel, shape: Shape) -> Any:
    return Laplace(
        model,
        "classification",
        subset_of_weights="lora",
        hessian_structure="lowrank_kron",
        class_token_ids=shape.class_token_ids,
    )


def _train(
    arguments: argparse.Namespace, shape: Shape, model: PeftModel, device: str
) -> dict[str, Any]:
    """Time training steps: forward, backward, AdamW."""
    logits_model = LogitsModel(model, shape.class_token_ids)
    optimizer = torch.optim.AdamW(lora_weights(model), lr=LEARNING_RATE)
    (batch,) = random_loader(shape, 1, device, arguments.seed)
    model.train()

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(logits_model(batch), batch["labels"]).backward()
        optimizer.step()

    steps = repeated_seconds(step, device, arguments.steps)
    model.eval()
    return steps


def _summary(figures: dict[str, Any]) -> str:
    """Say in a few lines what the table's figures were measured on."""
    settings, machine = figures["settings"], figures["machine"]
    hardware = machine["accelerator"] or f"{machine['processor']}, threads: {machine['threads']}"
    return (
        f"Random weights in the shape of Llama, {figures['number_of_weights'] / 1e9:.3g} billion "
        f"in {settings['dtype']}: hidden size {settings['hidden_size']}, layers "
        f"{settings['layers']}, vocabulary {settings['vocabulary']};\nthey stand for shapes and "
        f"speed only. LoRA of r {settings['rank']} on q_proj, v_proj and lm_head; batches of "
        f"{settings['batch_size']} texts of {settings['length']} tokens. {hardware}.\n"
        f"{STEPS_OF_TRAINING:,} steps are the median step of {settings['steps']} times "
        f"{STEPS_OF_TRAINING:,}; the fit is one over {settings['batches']} batches, measured "
        "whole.\nMemory is the peak with the model in it; with Laplace, that of the more "
        "demanding of the two phases."
    )
