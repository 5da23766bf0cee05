"""One method at one shape of the cost experiment, in a process of its own."""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.measuring import (
    BYTES_PER_MEGABYTE,
    Send,
    available_megabytes,
    megabytes_in_use,
    reason_of,
    run_limited,
    set_up,
    time_and_memory,
)
from benchmarks.methods import METHODS, posterior
from benchmarks.options import Cost
from benchmarks.random_models import Shape, random_llama, random_loader
from benchmarks.report import Row

# Rivals that hold the Jacobian of all weights take minutes and gigabytes for more.
LARGEST_BATCH_OF_JACOBIANS = 8


def contest(
    key: str, shape: Shape, batches: int, sizes: list[int], options: Cost, device: str
) -> Row:
    """One method's figures for one shape, and what of it has failed.

    A fit sees so many batches; `sizes` are those of predictions' batches.
    """
    if _holds_jacobian(key):
        sizes = [size for size in sizes if size <= max(LARGEST_BATCH_OF_JACOBIANS, min(sizes))]
    predictions: list[Row] = []
    failures: list[dict[str, str]] = []
    row: Row = {"contestant": key, "name": METHODS[key].title, "fit": None}
    row |= {"posterior_megabytes": None, "predict": predictions, "failures": failures}
    needed, available = needed_megabytes(key, shape, max(sizes)), options.memory_limit
    if available is None:
        available = available_megabytes(device)
    if needed > available:
        reason = f"needs at least {needed:.4g} MB of memory where {available:.4g} MB are free"
        failures.append({"what": "not run", "reason": reason})
        return row
    arguments = (key, shape, batches, sizes, options, device)
    messages, reason = run_limited(measure, arguments, options.limit)
    for kind, content in messages:
        if kind == "predict":
            predictions.append(content)
        elif kind == "failed":
            failures.append(content)
        elif kind in row:
            row[kind] = content
    if reason is not None:
        failures.append({"what": "stopped", "reason": reason})
    return row


def measure(
    send: Send,
    key: str,
    shape: Shape,
    batches: int,
    sizes: list[int],
    options: Cost,
    device: str,
) -> None:
    """Make a model, fit a method to it and predict; send figures, or what has failed and why."""
    set_up(options)
    logging.disable(logging.WARNING)
    model = random_llama(shape, device, options.seed)
    loader = random_loader(shape, batches, device, options.seed)

    # What PyTorch loads and keeps at the first passes is no rival's own.
    warm_up = posterior("bare").build(model)
    warm_up.fit(random_loader(shape, 1, device, options.seed, batch_size=1))
    before = megabytes_in_use(device)
    send("ready", None)

    la = posterior(key).build(model)
    figures = time_and_memory(lambda: la.fit(loader), device, options.repetitions, options.limit)
    per_batch = {"batches": batches, "seconds_per_batch": figures["median"] / batches}
    send("fit", {**figures, **per_batch})
    send("posterior_megabytes", _bytes_of(la.state_dict()["H"]) / BYTES_PER_MEGABYTE)
    for size in sizes:
        (batch,) = random_loader(shape, 1, device, options.seed + 1, size)

        def predict(batch: Any = batch) -> None:
            la(batch, pred_type="glm", link_approx="probit")

        try:
            held = megabytes_in_use(device) - before
            figures = time_and_memory(predict, device, options.repetitions, options.limit)
            figures["peak_megabytes"] += held
        except Exception as error:
            what = f"predictions, batch {size}"
            send("failed", {"what": what, "reason": reason_of(error)})
        else:
            send("predict", {**figures, "batch_size": size})


def needed_megabytes(key: str, shape: Shape, batch_size: int) -> float:
    """Estimate from below what a method must hold, from sizes alone.

    The model; for rivals that hold it, the Jacobian of all LoRA weights for a batch; and the dense
    factors of stock KFAC: as sums, as eigenvectors, and as what `eigh` works on.
    """
    sides = 2 * shape.layers * len(shape.target_modules)  # lora_A and lora_B
    numbers = 0
    if _holds_jacobian(key):
        numbers += batch_size * shape.classes * sides * shape.rank * shape.hidden_size
    if key.startswith("stock_kron"):
        numbers += (2 * sides + 1) * shape.hidden_size**2
    itemsize = getattr(torch, shape.dtype).itemsize
    return (itemsize * shape.number_of_weights + 4 * numbers) / BYTES_PER_MEGABYTE


def _holds_jacobian(key: str) -> bool:
    return key.startswith("stock") or key == "bayesian_lora"


def _bytes_of(content: Any) -> int:
    """Bytes of all tensors in a nest of mappings and sequences."""
    if isinstance(content, torch.Tensor):
        return content.nbytes
    parts = content.values() if isinstance(content, Mapping) else content
    return sum(map(_bytes_of, parts)) if isinstance(content, (Mapping, list, tuple)) else 0
