"""One method at one shape of the cost experiment, in a process of its own."""

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.measuring import (
    BYTES_PER_MEGABYTE,
    Send,
    available_megabytes,
    megabytes_in_use,
    reason_of,
    run_limited,
    time_and_memory,
)
from benchmarks.methods import METHODS, posterior
from benchmarks.random_models import Shape, random_llama, random_loader
from benchmarks.report import Row

# Rivals that hold the Jacobian of all weights take minutes and gigabytes for more.
LARGEST_BATCH_OF_JACOBIANS = 8
KNOWN_WARNINGS = (
    "By default `link_approx`",  # every call names its link
    "There is a performance drop",  # the stock classes' price, which the table shows
    "ASDL backend is used which does not",  # likewise
    "Full backward hook is firing",  # bayesian-lora hooks layers whose inputs have no gradient
)


@dataclass(frozen=True)
class Trial:
    """How each method is measured at one shape.

    With so many batches of a fit, sizes of predictions' batches, calls that count, and seconds.
    """

    shape: Shape
    batches: int
    prediction_batch_sizes: tuple[int, ...]
    repetitions: int
    limit: float
    device: str
    threads: int | None
    seed: int


def contest(key: str, trial: Trial, memory_limit: float | None) -> Row:
    """One method's figures for one shape, and what of it has failed."""
    row: Row = {
        "contestant": key,
        "name": METHODS[key].title,
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
    messages, reason = run_limited(measure, (key, trial), trial.limit)
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


def measure(send: Send, key: str, trial: Trial) -> None:
    """Make a model, fit a method to it and predict; send figures, or what has failed and why."""
    for known in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=known)
    logging.disable(logging.WARNING)
    if trial.threads is not None:
        torch.set_num_threads(trial.threads)
    shape, device = trial.shape, trial.device
    model = random_llama(shape, device, trial.seed)
    loader = random_loader(shape, trial.batches, device, trial.seed)

    # What PyTorch loads and keeps at the first passes is no rival's own.
    warm_up = posterior("bare").build(model)
    warm_up.fit(random_loader(shape, 1, device, trial.seed, batch_size=1))
    before = megabytes_in_use(device)
    send("ready", None)

    la = posterior(key).build(model)
    figures = time_and_memory(lambda: la.fit(loader), device, trial.repetitions, trial.limit)
    send("fit", {**figures, "batches": trial.batches})
    send("posterior", _bytes_of(la.state_dict()["H"]) / BYTES_PER_MEGABYTE)
    for batch_size in prediction_batch_sizes(key, trial):
        (batch,) = random_loader(shape, 1, device, trial.seed + 1, batch_size)

        def predict(batch: Any = batch) -> None:
            la(batch, pred_type="glm", link_approx="probit")

        try:
            held = megabytes_in_use(device) - before
            figures = time_and_memory(predict, device, trial.repetitions, trial.limit)
            figures["peak_megabytes"] += held
        except Exception as error:
            send("failed", (f"predictions, batch {batch_size}", reason_of(error)))
        else:
            send("predict", {**figures, "batch_size": batch_size})


def prediction_batch_sizes(key: str, trial: Trial) -> tuple[int, ...]:
    """Batch sizes at which a method predicts: not the large ones if it holds whole Jacobians."""
    sizes = trial.prediction_batch_sizes
    largest = LARGEST_BATCH_OF_JACOBIANS if _holds_jacobian(key) else max(sizes)
    return tuple(size for size in sizes if size <= max(largest, min(sizes)))


def needed_megabytes(key: str, trial: Trial) -> float:
    """Estimate from below what a method must hold, from sizes alone.

    The model; for rivals that hold it, the Jacobian of all LoRA weights; and the dense factors of
    stock KFAC, once as sums, once as eigenvectors, and once as what `eigh` works on.
    """
    shape = trial.shape
    sides = 2 * shape.layers * len(shape.target_modules)  # lora_A and lora_B
    numbers = 0
    if _holds_jacobian(key):
        weights = sides * shape.rank * shape.hidden_size
        numbers += max(prediction_batch_sizes(key, trial)) * shape.classes * weights
    if key.startswith("stock_kron"):
        numbers += (2 * sides + 1) * shape.hidden_size**2
    itemsize = getattr(torch, shape.dtype).itemsize
    return (itemsize * shape.number_of_weights + 4 * numbers) / BYTES_PER_MEGABYTE


def _holds_jacobian(key: str) -> bool:
    return key.startswith("stock") or key == "bayesian_lora"


def _bytes_of(content: Any) -> int:
    """Bytes of all tensors in a nest of mappings and sequences."""
    if isinstance(content, torch.Tensor):
        return content.numel() * content.element_size()
    if isinstance(content, Mapping):
        return sum(_bytes_of(part) for part in content.values())
    if isinstance(content, (list, tuple)):
        return sum(_bytes_of(part) for part in content)
    return 0
