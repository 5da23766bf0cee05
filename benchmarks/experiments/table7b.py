"""The paper's table of costs: LoRA training against LoRA training plus a Laplace fit."""

from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks import measuring
from benchmarks.methods import posterior
from benchmarks.models import AdaptedModel, device_of
from benchmarks.options import Table7b
from benchmarks.random_models import MEANING, Shape, random_llama, random_loader
from benchmarks.report import Result, Row, say, table

STEPS_OF_TRAINING = 10_000
LEARNING_RATE = 5e-5
LARGEST_ON_A_CPU = 100_000_000
MEGABYTES_PER_GIGABYTE = 1e3
COLUMNS = (
    "classes step_seconds training_seconds fit_seconds fit_seconds_per_batch time_overhead_percent "
    "paper_time training_gigabytes with_laplace_gigabytes memory_overhead_percent paper_memory"
)


def run(options: Table7b) -> Iterator[Result]:
    """Measure each row in a process of its own, so that its memory is untouched."""
    of_shape = {field.name for field in fields(Shape)}
    known: dict[str, Any] = {key: v for key, v in asdict(options).items() if key in of_shape}
    known["target_modules"] = ("q_proj", "v_proj", "lm_head")
    shapes = [Shape(**{**known, "classes": classes}) for classes in options.classes]
    weights, device = shapes[0].number_of_weights, device_of(options.device)
    if torch.device(device).type != "cuda" and weights > LARGEST_ON_A_CPU:
        raise SystemExit(
            f"table7b: a model of {weights / 1e9:.2g} billion weights needs a GPU, and none is in "
            "use; on a CPU give --device cpu and a small shape (at most "
            f"{LARGEST_ON_A_CPU / 1e9:g} billion weights, see --hidden-size and --layers)"
        )
    rows = []
    for shape in shapes:
        say(options, shape.classes, "classes")
        rows.append(measuring.run_alone(measure, options, shape, device))
    summary = (
        f"Random weights in the shape of Llama, {weights / 1e9:.3g} billion in {options.dtype}: "
        f"they tell about shapes and speed only. Batches of {options.batch_size} texts of "
        f"{options.length} tokens.\nTraining is the median step times {STEPS_OF_TRAINING:,}; the "
        f"fit is one over {options.batches} batches. Memory is the peak with the model in it; with "
        "Laplace, that of the more demanding phase."
    )
    figures = {"weights": MEANING, "number_of_weights": weights, "rows": rows}
    yield figures, [summary, table(rows, COLUMNS.split())]


def measure(options: Table7b, shape: Shape, device: str) -> Row:
    """Train for some steps, fit, and return the figures of both."""
    measuring.set_up(options)
    before = measuring.megabytes_in_use(device)
    with measuring.peak_memory(device) as training:
        model = random_llama(shape, device, options.seed)
        (batch,) = random_loader(shape, 1, device, options.seed)
        steps = _train(model, batch, options.steps)
    # After training, gradients and the optimiser's state are gone.
    for weight in model.lora_weights:
        weight.grad = None
    build = posterior("lowrank_kron").build
    # The first batch loads the device's kernels, as the first training step does.
    build(model).fit(random_loader(shape, 1, device, options.seed + 1))
    held = measuring.megabytes_in_use(device) - before
    la = build(model)
    loader = random_loader(shape, options.batches, device, options.seed)
    with measuring.peak_memory(device) as fitting:
        seconds = measuring.seconds_of(lambda: la.fit(loader, progress_bar=not options.quiet))
    training_seconds = STEPS_OF_TRAINING * steps["median"]
    gigabytes = training["megabytes"] / MEGABYTES_PER_GIGABYTE
    of_fit = (held + fitting["megabytes"]) / MEGABYTES_PER_GIGABYTE
    return {
        **{"classes": shape.classes, "step": steps, "step_seconds": steps["median"]},
        "training_seconds": training_seconds,
        **{"fit_seconds": seconds, "fit_seconds_per_batch": seconds / options.batches},
        **{"time_overhead_percent": 100 * seconds / training_seconds, "paper_time": "about 1 %"},
        "training_gigabytes": gigabytes,
        "fit_gigabytes": of_fit,
        "with_laplace_gigabytes": max(gigabytes, of_fit),
        "memory_overhead_percent": 100 * (max(gigabytes, of_fit) / gigabytes - 1),
        "paper_memory": "1 to 5 %",
    }


def _train(model: AdaptedModel, batch: Any, steps: int) -> dict[str, Any]:
    """Time training steps: forward, backward, AdamW."""
    optimizer = torch.optim.AdamW(model.lora_weights, lr=LEARNING_RATE)
    model.model.train()

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model.logits_model(batch), batch["labels"]).backward()
        optimizer.step()

    taken = measuring.repeated_seconds(step, steps)
    model.model.eval()
    return taken
