"""The paper's table of costs: LoRA training against LoRA training plus a Laplace fit."""

import sys
import time
from dataclasses import asdict, fields
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.measuring import (
    PeakMemory,
    Send,
    megabytes_in_use,
    repeated_seconds,
    run_alone,
    seconds_of,
    set_up,
)
from benchmarks.methods import posterior
from benchmarks.models import AdaptedModel, device_of
from benchmarks.options import Table7b
from benchmarks.random_models import MEANING, Shape, random_llama, random_loader
from benchmarks.report import Figures, hardware_of, provenance, table, write

STEPS_OF_TRAINING = 10_000
LEARNING_RATE = 5e-5
LARGEST_ON_A_CPU = 100_000_000
MEGABYTES_PER_GIGABYTE = 1e3
TITLES = {
    "classes": "Classes",
    "step_seconds": "Training step (s)",
    "training_seconds": f"{STEPS_OF_TRAINING:,} steps (s)",
    "fit_seconds": "Laplace fit (s)",
    "fit_seconds_per_batch": "a batch (s)",
    "time_overhead_percent": "Time, overhead (%)",
    "paper_time": "the paper's time",
    "training_gigabytes": "Training (GB)",
    "with_laplace_gigabytes": "+ Laplace (GB)",
    "memory_overhead_percent": "Memory, overhead (%)",
    "paper_memory": "the paper's memory",
}


def run(options: Table7b) -> Figures:
    """Measure the table, each row in a process of its own, whose memory no other one has touched.

    Raises
    ------
    SystemExit
        If there is no GPU for a shape that needs one, or the options contradict each other.
    """
    of_shape = {field.name for field in fields(Shape)}
    known = {key: value for key, value in asdict(options).items() if key in of_shape}
    known["target_modules"] = ("q_proj", "v_proj", "lm_head")
    shapes = [Shape(**known | {"classes": classes}) for classes in options.classes]
    device = device_of(options.device)
    _refuse(options, shapes[0], device)
    set_up(options)
    started = time.perf_counter()
    rows = []
    for shape in shapes:
        if not options.quiet:
            print(f"{shape.classes} classes", file=sys.stderr)
        try:
            rows.append(run_alone(measure_row, options, shape, device))
        except RuntimeError as error:
            raise SystemExit(f"table7b: {shape.classes} classes: {error}") from None
    figures = {
        "weights": MEANING,
        **provenance(options, device),
        "number_of_weights": shapes[0].number_of_weights,
        "rows": rows,
        "seconds": time.perf_counter() - started,
    }
    report = f"{_summary(figures)}\n\n{table(rows, list(TITLES), TITLES)}"
    write(options.output, "table7b", figures, report)
    return figures


def measure_row(send: Send, options: Table7b, shape: Shape, device: str) -> None:
    """Train for some steps, then fit, and send the figures of both."""
    set_up(options)
    before = megabytes_in_use(device)
    with PeakMemory(device) as training:
        model = random_llama(shape, device, options.seed)
        steps = _train(options, shape, model, device)
    # A fit comes after training, when gradients and the optimiser's state are gone.
    for weight in model.lora_weights:
        weight.grad = None
    build = posterior("lowrank_kron").build
    # The first batch loads what the device computes with, as the first training step does.
    build(model).fit(random_loader(shape, 1, device, options.seed + 1))
    held = megabytes_in_use(device) - before
    la = build(model)
    loader = random_loader(shape, options.batches, device, options.seed)
    with PeakMemory(device) as fitting:
        fit_seconds = seconds_of(lambda: la.fit(loader, progress_bar=not options.quiet))
    training_seconds = STEPS_OF_TRAINING * steps["median"]
    fit_megabytes = held + fitting.megabytes
    both = max(training.megabytes, fit_megabytes)
    row = {
        "classes": shape.classes,
        "step": steps,
        "step_seconds": steps["median"],
        "training_seconds": training_seconds,
        "fit_seconds": fit_seconds,
        "fit_seconds_per_batch": fit_seconds / options.batches,
        "time_overhead_percent": 100 * fit_seconds / training_seconds,
        "paper_time": "about 1 %",
        "training_gigabytes": training.megabytes / MEGABYTES_PER_GIGABYTE,
        "fit_gigabytes": fit_megabytes / MEGABYTES_PER_GIGABYTE,
        "with_laplace_gigabytes": both / MEGABYTES_PER_GIGABYTE,
        "memory_overhead_percent": 100 * (both / training.megabytes - 1),
        "paper_memory": "1 to 5 %",
    }
    send("row", row)


def _refuse(options: Table7b, shape: Shape, device: str) -> None:
    """End with one line where the run could not be what it is meant to be."""
    if not all(2 <= classes <= shape.vocabulary for classes in options.classes):
        raise SystemExit(f"table7b: --classes must be from 2 to {shape.vocabulary}")
    if shape.hidden_size % shape.heads:
        raise SystemExit(f"table7b: {shape.heads} heads do not divide {shape.hidden_size}")
    if torch.device(device).type == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit(f"table7b: there is no CUDA device for --device {device}")
    elif options.device is None or shape.number_of_weights > LARGEST_ON_A_CPU:
        raise SystemExit(
            f"table7b: a model of {shape.number_of_weights / 1e9:.2g} billion weights needs a "
            "GPU, and none is in use; on a CPU give --device cpu with a small shape (at most "
            f"{LARGEST_ON_A_CPU / 1e9:g} billion weights, see --hidden-size and --layers)"
        )


def _train(options: Table7b, shape: Shape, model: AdaptedModel, device: str) -> dict[str, Any]:
    """Time training steps: forward, backward, AdamW."""
    optimizer = torch.optim.AdamW(model.lora_weights, lr=LEARNING_RATE)
    (batch,) = random_loader(shape, 1, device, options.seed)
    model.model.train()

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model.logits_model(batch), batch["labels"]).backward()
        optimizer.step()

    steps = repeated_seconds(step, options.steps)
    model.model.eval()
    return steps


def _summary(figures: Figures) -> str:
    """Say in a few lines what the table's figures were measured on."""
    settings = figures["settings"]
    return (
        f"Random weights in the shape of Llama, {figures['number_of_weights'] / 1e9:.3g} billion "
        f"in {settings['dtype']}: hidden size {settings['hidden_size']}, layers "
        f"{settings['layers']}, vocabulary {settings['vocabulary']};\nthey stand for shapes and "
        f"speed only. LoRA of r {settings['rank']} on q_proj, v_proj and lm_head; batches of "
        f"{settings['batch_size']} texts of {settings['length']} tokens. {hardware_of(figures)}.\n"
        f"{STEPS_OF_TRAINING:,} steps are the median step of {settings['steps']} times "
        f"{STEPS_OF_TRAINING:,}; the fit is one over {settings['batches']} batches, measured "
        "whole.\nMemory is the peak with the model in it; with Laplace, that of the more "
        "demanding of the two phases."
    )
