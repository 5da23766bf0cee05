"""How close each curvature comes to the exact one, and what memory that takes."""

import inspect
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from benchmarks.experiments.curvature_errors import (
    approximate_posterior,
    errors,
    exact_posterior,
)
from benchmarks.experiments.exact_curvature import (
    DenseCurvature,
    evidence_prior_precision,
    jacobians,
)
from benchmarks.experiments.fidelity_models import (
    ARCHITECTURES,
    LORA,
    MAXIMUM_LENGTH,
    Architecture,
    SmallModel,
)
from benchmarks.experiments.fidelity_report import draw, means, text_of, verdict
from benchmarks.fine_tuning import fine_tune
from benchmarks.methods import posterior
from benchmarks.methods.approximations import over_lora
from benchmarks.methods.method import Posterior
from benchmarks.models import encoder_folder, load_tokenizer
from benchmarks.options import Fidelity
from benchmarks.report import Figures, Row, provenance, write
from benchmarks.tasks.docstrings import read_docstrings
from benchmarks.tasks.task import Sizes, Task
from benchmarks.training import Records
from laplace_lora_ext.curvature.backend import LowRankKronInterface
from laplace_lora_ext.curvature.statistics import KFAC_APPROX

DEVICE = "cpu"
KEYWORDS = ("kfac_approx", "rank", "tail")
_PARAMETERS = inspect.signature(LowRankKronInterface).parameters
DEFAULTS: dict[str, Any] = {keyword: _PARAMETERS[keyword].default for keyword in KEYWORDS}


@dataclass(frozen=True)
class Curvature:
    """A method, and the library's settings of its curvature; none for the host's structures."""

    method: Posterior
    settings: dict[str, Any]

    @property
    def row(self) -> Row:
        """What figures say of it."""
        return {
            "name": self.method.title,
            "structure": self.method.key,
            "is_default": self.settings == DEFAULTS,
            **{keyword: self.settings.get(keyword) for keyword in KEYWORDS},
        }


def all_curvatures(ranks: Iterable[int], hidden_size: int) -> Iterator[Curvature]:
    """The library's settings at every rank, their limits of full rank, and the host's structures.

    The default's rank is added if it is not among them; at the full rank, which is the hidden size,
    nothing is left for a tail.
    """

    def ours(name: str, kfac_approx: str, rank: int, tail: bool) -> Curvature:
        settings = {"kfac_approx": kfac_approx, "rank": rank, "tail": tail}
        build = partial(over_lora, backend_kwargs=settings)
        return Curvature(Posterior("lowrank_kron", name, build), settings)

    for kfac_approx in KFAC_APPROX:
        for rank in sorted({*ranks, DEFAULTS["rank"]}):
            for tail in (True, False):
                name = f"{kfac_approx}, rank {rank}" + (", tail" if tail else "")
                yield ours(name, kfac_approx, rank, tail)
        yield ours(f"{kfac_approx}, full rank", kfac_approx, hidden_size, False)
    for key in ("kron", "diag"):
        yield Curvature(posterior(key), {})


def run(options: Fidelity) -> Figures:
    """Measure every curvature on every model and seed, and write tables, figures and plot."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    options.output.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", message="The posterior is over lora_A and lora_B")
    models: list[Row] = []
    rows: list[Row] = []
    for seed in options.seeds:
        sizes = Sizes(options.base_examples, options.train_examples, options.test_examples, 0)
        task = read_docstrings(sizes, seed, options.files_per_library, not options.quiet)
        for architecture in ARCHITECTURES:
            labels = {"model": architecture.name, "seed": seed}
            facts, measured = _measure(architecture, task, seed, options)
            models.append(labels | facts)
            rows += [labels | row for row in measured]
    judged = verdict(rows)
    figures = {
        **provenance(options, DEVICE),
        "classes": list(task.classes),
        "models": models,
        "curvatures": rows,
        "means": means(rows),
        "verdict": judged,
    }
    by_model = {
        architecture.name: means([row for row in rows if row["model"] == architecture.name])
        for architecture in ARCHITECTURES
    }
    draw({"mean of all": figures["means"], **by_model}, options.output / "fidelity.png")
    report = text_of(models, by_model, figures["means"], judged)
    write(options.output, "fidelity", figures, report)
    return figures


def _measure(
    architecture: Architecture, task: Task, seed: int, options: Fidelity
) -> tuple[Row, list[Row]]:
    """Train one model; return what it is like, and the errors of each curvature on it."""
    folder = encoder_folder()  # whose tokenizer is used, and not its weights
    settings = replace(LORA, model=architecture.name, target_modules=architecture.target_modules)
    small = SmallModel(
        task,
        replace(settings.for_epochs(options.epochs, len(task.validation)), warmup_steps=0),
        load_tokenizer(folder),
        folder,
        DEVICE,
        options.cache,
        not options.quiet,
        architecture=architecture,
        hidden_size=options.hidden_size,
        seed=seed,
    )
    train, test = small.records(task.validation), small.records(task.test)
    model = fine_tune(small, train, seed)
    # The norms of a Llama compute in float32 within, for all curvatures alike.
    model.model.double()
    sizes = [weight.numel() for weight in model.lora_weights]

    def differentiated(records: Records) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Jacobians, logits and labels of texts, without padding."""
        examples = tqdm(
            small.loader(records, 1),
            desc=f"Jacobians, {architecture.name}",
            disable=options.quiet,
        )
        labels = torch.tensor([record["labels"] for record in records])
        return *jacobians(model.logits_model, model.lora_weights, examples), labels

    (Js, logits, labels), (test_Js, test_logits, test_labels) = map(differentiated, (train, test))
    curvature = DenseCurvature.of_softmax(Js, logits, sizes)
    weights = torch.cat([weight.detach().flatten() for weight in model.lora_weights])
    prior_precision = evidence_prior_precision(curvature, weights)
    exact = exact_posterior(curvature, test_Js, prior_precision)
    full = DenseCurvature.of_softmax(Js, logits, [sum(sizes)]).covariance(test_Js, prior_precision)
    rows = []
    curvatures = list(all_curvatures(options.ranks, options.hidden_size))
    for each in tqdm(curvatures, desc=f"Fitting, {architecture.name}", disable=options.quiet):
        la = each.method.build(model)
        la.fit(small.loader(train, LORA.batch_size))
        approximate = approximate_posterior(la, sizes, test_Js, prior_precision)
        rows.append(each.row | errors(approximate, exact, full, prior_precision))
    of_exact = errors(exact, exact, full, prior_precision)
    facts = {
        "weights": sum(sizes),
        "train_accuracy": (logits.argmax(-1) == labels).double().mean().item(),
        "train_nll": cross_entropy(logits, labels).item(),
        "test_accuracy": (test_logits.argmax(-1) == test_labels).double().mean().item(),
        "prior_precision": prior_precision,
        "full_covariance_error": of_exact["full_covariance_error"],
    }
    return facts, rows
