"""The methods that are compared: each turns the fine-tuned model into class probabilities."""

import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from laplace import Laplace
from peft import PeftModel
from torch.utils.data import DataLoader
from tqdm import tqdm

import laplace_lora_ext
from benchmarks.memory import PeakMemory
from benchmarks.minilm import load_fine_tuned, load_tokenizer, padding_collator, predict_logits
from benchmarks.temperature import fit_temperature
from laplace_lora_ext.models.logits_model import LogitsModel

PREDICTION_BATCH_SIZE = 8

Predict = Callable[[Any], torch.Tensor]
Method = Literal["map", "temperature", "stock diag", "stock kron", "lowrank_kron"]


@dataclass(frozen=True)
class Contestant:
    """One row of the table.

    Attributes
    ----------
    name : str
        How the table calls it.
    method : str
        Which way from the model to probabilities.
    prior_structure, link : str
        Structure of the prior precision and link approximation of a Laplace approximation.
    chosen_by : str
        What chooses its prior precision, "marglik" or "linearized_loo".
    backend_kwargs : dict, optional
        Settings of the library's curvature backend.
    fit_batch_size : int, optional
        Batch size for fitting; the one of the training if not given.
    prediction_batch_size : int
        Batch size for predictions.
    """

    name: str
    method: Method
    prior_structure: str = "scalar"
    link: str = "mc"
    chosen_by: str = "marglik"
    backend_kwargs: dict[str, Any] | None = None
    fit_batch_size: int | None = None
    prediction_batch_size: int = PREDICTION_BATCH_SIZE


@dataclass(frozen=True)
class Task:
    """What all contestants share: the fine-tuned model and the tokenized texts."""

    model_folder: Path
    number_of_classes: int
    train: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    test: list[dict[str, Any]]
    shifted: list[dict[str, Any]]
    batch_size: int
    samples: int
    device: str
    threads: int | None
    seed: int
    show_progress: bool


@dataclass(frozen=True)
class Outcome:
    """What one contestant did.

    Attributes
    ----------
    test_probabilities, shifted_probabilities : torch.Tensor
        Class probabilities (texts, classes).
    fit_seconds : float
        Time to make the method from the fine-tuned model, the choice of prior precision or
        temperature included.
    predict_seconds : float
        Time for the probabilities of the test texts.
    peak_megabytes : float
        Peak memory of fitting and predicting over that of the model and the data, see
        `PeakMemory`.
    settings : dict
        What the method chose: its temperature or its prior precisions.
    """

    test_probabilities: torch.Tensor
    shifted_probabilities: torch.Tensor
    fit_seconds: float
    predict_seconds: float
    peak_megabytes: float
    settings: dict[str, Any]


def all_contestants(prior_structure: str, link: str) -> list[Contestant]:
    """List the table's rows.

    Parameters
    ----------
    prior_structure, link : str
        Settings of every Laplace approximation. The library's are repeated under the paper's
        protocol, a scalar prior precision and Monte-Carlo links, where these differ from it; and
        under the README's, whose prior precision leave-one-out cross-validation chooses.

    Returns
    -------
    contestants : list of Contestant
        Rows from the bare model to the library's.
    """
    settings = {"prior_structure": prior_structure, "link": link}
    protocol = {"prior_structure": "scalar", "link": "mc"}

    def laplace(name: str, method: Method, **kwargs: Any) -> Contestant:
        label = f"{name}, {kwargs['prior_structure']}, {kwargs['link']}"
        return Contestant(label, method, **kwargs)

    def library(settings: dict[str, str]) -> list[Contestant]:
        paper = laplace_lora_ext.PAPER_SETTINGS
        return [
            laplace("lowrank_kron (paper)", "lowrank_kron", backend_kwargs=paper, **settings),
            laplace("lowrank_kron", "lowrank_kron", **settings),
        ]

    recipe = Contestant(
        "lowrank_kron, leave-one-out, layerwise, mean field",
        "lowrank_kron",
        prior_structure="layerwise",
        link="mean_field",
        chosen_by="linearized_loo",
    )
    # Stock classes differentiate every logit of a batch with respect to the weights by passes over
    # the whole batch, so that a text costs the least time and memory in a batch of its own.
    # KFAC alone is fitted on whole batches, which change what it estimates.
    alone = {"prediction_batch_size": 1}
    return [
        Contestant("MAP", "map"),
        Contestant("Temperature scaling", "temperature"),
        laplace("Stock diag", "stock diag", fit_batch_size=1, **alone, **settings),
        laplace("Stock Kron", "stock kron", **alone, **settings),
        *library(settings),
        *(library(protocol) if settings != protocol else []),
        recipe,
    ]


def compete_alone(contestant: Contestant, task: Task) -> Outcome:
    """Run one contestant in a process of its own, so that none sees another's memory or model.

    Parameters
    ----------
    contestant : Contestant
        The method to run.
    task : Task
        The model and the texts.

    Returns
    -------
    outcome : Outcome
        Probabilities, times and memory.
    """
    if "forkserver" in get_all_start_methods():
        # The server imports the libraries once for all contestants.
        context = get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.contestants"])
    else:
        context = get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as executor:
        return executor.submit(compete, contestant, task).result()


def compete(contestant: Contestant, task: Task) -> Outcome:
    """Load the fine-tuned model, make the method from it and predict.

    Parameters
    ----------
    contestant : Contestant
        The method to run.
    task : Task
        The model and the texts.

    Returns
    -------
    outcome : Outcome
        Probabilities, times and memory.
    """
    for known in (
        "By default `link_approx`",  # every call names its link
        "The posterior is over lora_A and lora_B",  # the head stays at its MAP value in every row
        "There is a performance drop",  # the stock classes' price, which the table shows
    ):
        warnings.filterwarnings("ignore", message=known)
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    transformers.set_seed(task.seed)
    model = load_fine_tuned(task.model_folder, task.number_of_classes, task.device)
    collate = padding_collator(load_tokenizer(), task.device)

    def loader(records: list[dict[str, Any]], batch_size: int) -> DataLoader:
        return DataLoader(records, batch_size=batch_size, collate_fn=collate)  # pyright: ignore[reportArgumentType]

    fit_loader = loader(task.train, contestant.fit_batch_size or task.batch_size)
    validation_loader = loader(task.validation, PREDICTION_BATCH_SIZE)
    test_loader = loader(task.test, contestant.prediction_batch_size)
    shifted_loader = loader(task.shifted, contestant.prediction_batch_size)

    # The weights are mapped from their file: they count as the model's memory once they are used.
    predict_logits(model, loader(task.test[:1], 1))

    with PeakMemory(task.device) as memory:
        started = time.perf_counter()
        predict, settings = METHODS[contestant.method](
            contestant, task, model, fit_loader, validation_loader
        )
        fitted = time.perf_counter()
        test = predict_all(predict, test_loader, "Test texts", task.show_progress)
        predicted = time.perf_counter()
        shifted = predict_all(predict, shifted_loader, "Shifted texts", task.show_progress)
    return Outcome(
        test_probabilities=test,
        shifted_probabilities=shifted,
        fit_seconds=fitted - started,
        predict_seconds=predicted - fitted,
        peak_megabytes=memory.megabytes,
        settings=settings,
    )


def predict_all(
    predict: Predict, batches: DataLoader, description: str, show_progress: bool
) -> torch.Tensor:
    """Predict one batch after another.

    Parameters
    ----------
    predict : callable
        A batch to its class probabilities.
    batches : DataLoader
        Batches in a fixed order.
    description : str
        What the progress bar says.
    show_progress : bool
        Whether to show a progress bar.

    Returns
    -------
    probabilities : torch.Tensor
        Probabilities (texts, classes) on the CPU.
    """
    return torch.cat(
        [
            predict(batch).detach().cpu()
            for batch in tqdm(batches, desc=description, disable=not show_progress, unit="batch")
        ]
    )


def fit_map(
    contestant: Contestant,
    task: Task,
    model: PeftModel,
    fit_loader: DataLoader,
    validation_loader: DataLoader,
) -> tuple[Predict, dict[str, Any]]:
    """Take the model as it is."""

    def predict(batch: Any) -> torch.Tensor:
        return predict_logits(model, [batch]).softmax(-1)

    return predict, {}


def fit_temperature_scaling(
    contestant: Contestant,
    task: Task,
    model: PeftModel,
    fit_loader: DataLoader,
    validation_loader: DataLoader,
) -> tuple[Predict, dict[str, Any]]:
    """Divide the logits by the one number that minimises the validation texts' NLL."""
    logits = predict_logits(model, validation_loader)
    labels = torch.tensor([record["labels"] for record in task.validation])
    temperature = fit_temperature(logits, labels)

    def predict(batch: Any) -> torch.Tensor:
        return (predict_logits(model, [batch]) / temperature).softmax(-1)

    return predict, {"temperature": temperature}


def fit_stock(
    contestant: Contestant,
    task: Task,
    model: PeftModel,
    fit_loader: DataLoader,
    validation_loader: DataLoader,
) -> tuple[Predict, dict[str, Any]]:
    """Fit laplace-torch's own class on the LoRA weights."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_A" in name or "lora_B" in name)
    approximation = Laplace(
        LogitsModel(model),
        "classification",
        subset_of_weights="all",
        hessian_structure=contestant.method.removeprefix("stock "),
    )
    return _fit_posterior(approximation, contestant, task, fit_loader)


def fit_lowrank_kron(
    contestant: Contestant,
    task: Task,
    model: PeftModel,
    fit_loader: DataLoader,
    validation_loader: DataLoader,
) -> tuple[Predict, dict[str, Any]]:
    """Fit this library's class on the model as it was trained."""
    approximation = Laplace(
        model,
        "classification",
        subset_of_weights="lora",
        hessian_structure="lowrank_kron",
        backend_kwargs=contestant.backend_kwargs,
    )
    return _fit_posterior(approximation, contestant, task, fit_loader)


METHODS = {
    "map": fit_map,
    "temperature": fit_temperature_scaling,
    "stock diag": fit_stock,
    "stock kron": fit_stock,
    "lowrank_kron": fit_lowrank_kron,
}


def _fit_posterior(
    approximation: Any, contestant: Contestant, task: Task, fit_loader: DataLoader
) -> tuple[Predict, dict[str, Any]]:
    approximation.fit(fit_loader, progress_bar=task.show_progress)
    data = {"train_loader": fit_loader} if contestant.chosen_by == "linearized_loo" else {}
    approximation.optimize_prior_precision(
        method=contestant.chosen_by,
        prior_structure=contestant.prior_structure,
        progress_bar=task.show_progress,
        **data,
    )

    def predict(batch: Any) -> torch.Tensor:
        return approximation(
            batch, pred_type="glm", link_approx=contestant.link, n_samples=task.samples
        )

    return predict, {"prior_precision": approximation.prior_precision.tolist()}
