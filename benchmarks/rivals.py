"""Ways from a model with LoRA layers to a posterior and predictions, and what each costs."""

import inspect
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from laplace import Laplace
from peft import PeftModel
from torch.utils.data import DataLoader

import laplace_lora_ext
from benchmarks.measuring import Send, megabytes_in_use, reason_of, time_and_memory
from benchmarks.memory import BYTES_PER_MEGABYTE
from benchmarks.random_models import Shape, lora_weights, random_llama, random_loader
from laplace_lora_ext.curvature.fisher import exact_seeds
from laplace_lora_ext.models.logits_model import LogitsModel

# The paper's rank of large Kronecker factors, and this library's default.
LARGE_FACTOR_RANK = 10
# Rivals that hold the Jacobian of all weights take minutes and gigabytes for more.
LARGEST_BATCH_OF_JACOBIANS = 8


@dataclass(frozen=True)
class Rival:
    """One way to a posterior and predictions.

    Attributes
    ----------
    fit : callable
        Takes the batches.
    predict : callable
        Takes a batch, returns class probabilities.
    posterior : callable
        Returns what holds the fitted posterior's tensors.
    """

    fit: Callable[[DataLoader], None]
    predict: Callable[[Any], torch.Tensor]
    posterior: Callable[[], Any]


@dataclass(frozen=True)
class Trial:
    """How each rival is measured.

    Attributes
    ----------
    shape : Shape
        Sizes of the model and of the batches of a fit.
    batches : int
        Batches of a fit.
    prediction_batch_sizes : tuple of int
        Texts in a batch of a prediction.
    repetitions : int
        Calls that count.
    limit : float
        Seconds that a rival has.
    device : str
        Device of the model.
    threads : int or None
        PyTorch's threads.
    seed : int
        Seed of weights and tokens.
    """

    shape: Shape
    batches: int
    prediction_batch_sizes: tuple[int, ...]
    repetitions: int
    limit: float
    device: str
    threads: int | None
    seed: int


def bare_loop(model: PeftModel, shape: Shape) -> Rival:
    """The passes without which no rival could do: gradients of LoRA weights, and no posterior.

    A fit is one forward pass and C - 1 backward passes a batch, a prediction one and C.
    """
    logits_model = LogitsModel(model, shape.class_token_ids)
    weights = lora_weights(model)

    def differentiate(logits: torch.Tensor, seeds: torch.Tensor) -> None:
        for number, seed in enumerate(seeds, start=1):
            torch.autograd.grad(logits, weights, seed, retain_graph=number < len(seeds))

    def fit(batches: DataLoader) -> None:
        for batch in batches:
            logits = logits_model(batch)
            differentiate(logits, exact_seeds(logits.detach(), "classification").vectors)

    def predict(batch: Any) -> torch.Tensor:
        logits = logits_model(batch)
        identity = torch.eye(shape.classes, device=logits.device)
        differentiate(logits, identity[:, None].expand(-1, len(logits), -1))
        return logits.detach().softmax(-1)

    return Rival(fit, predict, lambda: ())


def lowrank_kron(model: PeftModel, shape: Shape) -> Rival:
    """Fit this library's class with its defaults."""
    return _library(model, shape, None)


def lowrank_kron_paper(model: PeftModel, shape: Shape) -> Rival:
    """Fit this library's class with the paper's settings."""
    return _library(model, shape, laplace_lora_ext.PAPER_SETTINGS)


def stock_kron(model: PeftModel, shape: Shape) -> Rival:
    """laplace-torch's KFAC with its default backend, curvlinops."""
    return _stock(model, shape, "kron")


def stock_kron_asdl(model: PeftModel, shape: Shape) -> Rival:
    """laplace-torch's KFAC with ASDL."""
    from laplace.curvature.asdl import AsdlGGN

    return _stock(model, shape, "kron", backend=AsdlGGN)


def stock_diag(model: PeftModel, shape: Shape) -> Rival:
    """laplace-torch's diagonal with its default backend."""
    return _stock(model, shape, "diag")


def bayesian_lora(model: PeftModel, shape: Shape) -> Rival:
    """The package of that name, with the low-rank factors and the linearised predictions it has."""
    try:
        from bayesian_lora.kfac import calculate_kronecker_factors  # pyright: ignore
        from bayesian_lora.main import (  # pyright: ignore
            cholesky_decompose_small_factors,
            jacobian_mean,
            variance,
        )
    except ImportError as error:
        raise RuntimeError(f"the package bayesian-lora cannot be imported ({error})") from error
    logits_model = LogitsModel(model, shape.class_token_ids)
    device = str(logits_model.device)
    threshold = shape.rank + 1
    prior_variance = torch.ones((), device=device)
    # As `LogitsModel` does for the others: no cache, and the answer's logits alone.
    options = {"use_cache": False, "logits_to_keep": 1}
    known = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
    options = {key: value for key, value in options.items() if key in known}
    fitted: dict[str, Any] = {}

    def fit(batches: DataLoader) -> None:
        factors = calculate_kronecker_factors(
            model,
            lambda _, batch: logits_model(batch),
            batches,
            n_kfac=LARGE_FACTOR_RANK,
            lr_threshold=threshold,
            target_module_keywords=["lora"],
        )
        fitted["factors"] = cholesky_decompose_small_factors(
            factors, threshold, device, torch.float32
        )
        model.eval()

    def answer_logits(outputs: Any) -> torch.Tensor:
        return outputs.logits[:, -1, shape.class_token_ids]

    def predict(batch: Any) -> torch.Tensor:
        inputs = type(batch)({key: value for key, value in batch.items() if key != "labels"})
        jacobian, mean = jacobian_mean(
            model,
            type(batch)({**inputs, **options}),
            output_callback=answer_logits,
        )
        covariance = variance(
            inputs,
            jacobian,
            fitted["factors"],
            prior_variance,
            shape.classes,
            shape.rank,
            LARGE_FACTOR_RANK,
            device,
        )
        scale = (1 + torch.pi / 8 * covariance.diagonal(dim1=-2, dim2=-1)).sqrt()
        return (mean / scale).softmax(-1)

    return Rival(fit, predict, lambda: fitted["factors"])


RIVALS: dict[str, Callable[[PeftModel, Shape], Rival]] = {
    "bare": bare_loop,
    "lowrank_kron": lowrank_kron,
    "lowrank_kron_paper": lowrank_kron_paper,
    "stock_kron": stock_kron,
    "stock_kron_asdl": stock_kron_asdl,
    "stock_diag": stock_diag,
    "bayesian_lora": bayesian_lora,
}

NAMES = {
    "bare": "Bare loops",
    "lowrank_kron": "lowrank_kron",
    "lowrank_kron_paper": "lowrank_kron (paper)",
    "stock_kron": "Stock Kron",
    "stock_kron_asdl": "Stock Kron (ASDL)",
    "stock_diag": "Stock diag",
    "bayesian_lora": "bayesian-lora",
}


def prediction_batch_sizes(key: str, trial: Trial) -> tuple[int, ...]:
    """Batch sizes at which a rival predicts: not the large ones if it holds whole Jacobians."""
    sizes = trial.prediction_batch_sizes
    largest = LARGEST_BATCH_OF_JACOBIANS if _holds_jacobian(key) else max(sizes)
    return tuple(size for size in sizes if size <= max(largest, min(sizes)))


def _holds_jacobian(key: str) -> bool:
    return key.startswith("stock") or key == "bayesian_lora"


def needed_megabytes(key: str, trial: Trial) -> float:
    """Estimate from below what a rival must hold, from sizes alone.

    Parameters
    ----------
    key : str
        Of `RIVALS`.
    trial : Trial
        How it is measured.

    Returns
    -------
    megabytes : float
        The model; for rivals that hold it, the Jacobian of all LoRA weights; and the dense factors
        of stock KFAC, once as sums, once as eigenvectors, and once as what `eigh` works on.
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


def measure(send: Send, key: str, trial: Trial) -> None:
    """Make a model, fit a rival on it and predict; to be run in a process of its own.

    Parameters
    ----------
    send : callable
        Takes "ready" when the rival begins; "fit", "posterior" and "predict" with figures; and
        "failed" with what has failed and why, where others can go on.
    key : str
        Of `RIVALS`.
    trial : Trial
        How to measure it.
    """
    _silence()
    if trial.threads is not None:
        torch.set_num_threads(trial.threads)
    shape, device = trial.shape, trial.device
    model = random_llama(shape, device, trial.seed)
    loader = random_loader(shape, trial.batches, device, trial.seed)

    # What PyTorch loads and keeps at the first passes is no rival's own.
    warm_up = bare_loop(model, shape)
    warm_up.fit(random_loader(shape, 1, device, trial.seed, batch_size=1))
    before = megabytes_in_use(device)
    send("ready", None)

    rival = RIVALS[key](model, shape)
    figures = time_and_memory(lambda: rival.fit(loader), device, trial.repetitions, trial.limit)
    send("fit", {**figures, "batches": trial.batches})
    send("posterior", _bytes_of(rival.posterior()) / BYTES_PER_MEGABYTE)
    for batch_size in prediction_batch_sizes(key, trial):
        (batch,) = random_loader(shape, 1, device, trial.seed + 1, batch_size)
        try:
            held = megabytes_in_use(device) - before
            figures = time_and_memory(
                lambda batch=batch: rival.predict(batch), device, trial.repetitions, trial.limit
            )
            figures["peak_megabytes"] += held
        except Exception as error:
            send("failed", (f"predictions, batch {batch_size}", reason_of(error)))
        else:
            send("predict", {**figures, "batch_size": batch_size})


def _library(model: PeftModel, shape: Shape, backend_kwargs: dict[str, Any] | None) -> Rival:
    la: Any = Laplace(
        model,
        "classification",
        subset_of_weights="lora",
        hessian_structure="lowrank_kron",
        class_token_ids=shape.class_token_ids,
        backend_kwargs=backend_kwargs,
    )
    return _rival(la)


def _stock(model: PeftModel, shape: Shape, structure: str, **kwargs: Any) -> Rival:
    la: Any = Laplace(
        LogitsModel(model, shape.class_token_ids),
        "classification",
        subset_of_weights="all",
        hessian_structure=structure,
        **kwargs,
    )
    return _rival(la)


def _rival(la: Any) -> Rival:
    def predict(batch: Any) -> torch.Tensor:
        return la(batch, pred_type="glm", link_approx="probit")

    return Rival(la.fit, predict, lambda: la.state_dict()["H"])


def _bytes_of(content: Any) -> int:
    """Bytes of all tensors in a nest of mappings and sequences."""
    if isinstance(content, torch.Tensor):
        return content.numel() * content.element_size()
    if isinstance(content, Mapping):
        return sum(_bytes_of(part) for part in content.values())
    if isinstance(content, (list, tuple)):
        return sum(_bytes_of(part) for part in content)
    return 0


def _silence() -> None:
    for known in (
        "By default `link_approx`",  # every call names its link
        "There is a performance drop",  # the stock classes' price, which the table shows
        "ASDL backend is used which does not",  # likewise
        "Full backward hook is firing",  # bayesian-lora hooks layers whose inputs have no gradient
    ):
        warnings.filterwarnings("ignore", message=known)
    logging.disable(logging.WARNING)
