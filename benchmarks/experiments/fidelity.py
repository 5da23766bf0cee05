"""How close each curvature comes to the exact one, and how much memory it needs."""

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from benchmarks.experiments import curvature_errors as exactly
from benchmarks.experiments.fidelity_models import ARCHITECTURES, LORA, Architecture, SmallModel
from benchmarks.experiments.fidelity_report import draw, means, text_of
from benchmarks.fine_tuning import fine_tune
from benchmarks.methods import posterior
from benchmarks.methods.method import Posterior, labels_of
from benchmarks.methods.posteriors import over_lora
from benchmarks.models import encoder_folder, load_tokenizer
from benchmarks.options import Fidelity
from benchmarks.report import Result, Row
from benchmarks.tasks import docstrings
from benchmarks.tasks.balanced import draw_balanced
from benchmarks.tasks.docstrings import LIBRARIES, SHIFTED_LIBRARY
from benchmarks.tasks.task import Sizes, Task
from laplace_lora_ext.curvature.backend import LowRankKronInterface
from laplace_lora_ext.curvature.statistics import KFAC_APPROX

KEYWORDS = ("kfac_approx", "rank", "tail")
_PARAMETERS = inspect.signature(LowRankKronInterface).parameters
Curvature = tuple[Posterior, dict[str, Any]]
DEFAULTS: dict[str, Any] = {keyword: _PARAMETERS[keyword].default for keyword in KEYWORDS}


def all_curvatures(ranks: Iterable[int], hidden_size: int) -> Iterator[Curvature]:
    """Every curvature to compare, with its settings; the host's structures have none."""
    sizes = [
        (f"rank {rank}{', tail' if tail else ''}", rank, tail)
        for rank in sorted({*ranks, DEFAULTS["rank"]})
        for tail in (True, False)
    ]
    for kfac_approx in KFAC_APPROX:
        for title, *size in (*sizes, ("full rank", hidden_size, False)):
            settings: dict[str, Any] = dict(zip(KEYWORDS, (kfac_approx, *size), strict=True))
            build = partial(over_lora, backend_kwargs=settings)
            yield Posterior("lowrank_kron", f"{kfac_approx}, {title}", build), settings
    yield from ((posterior(key), {}) for key in ("kron", "diag"))


def run(options: Fidelity) -> Iterator[Result]:
    """Measure every curvature on every model and seed; then draw."""
    transformers.logging.set_verbosity_error()
    models, rows = [], []
    for seed in options.seeds:
        sizes = Sizes(options.base_examples, options.train_examples, options.test_examples, 0)
        texts = docstrings.find(options, seed)
        task = draw_balanced("docstrings", texts, LIBRARIES, sizes, seed, SHIFTED_LIBRARY)
        for architecture in ARCHITECTURES:
            labels = {"model": architecture.name, "seed": seed}
            facts, measured = _measure(architecture, task, seed, options)
            models.append(labels | facts)
            rows += [labels | row for row in measured]
    figures = {"classes": list(LIBRARIES), "models": models, "curvatures": rows}
    figures |= {"means": means(rows)}
    by_model = {
        architecture.name: means([row for row in rows if row["model"] == architecture.name])
        for architecture in ARCHITECTURES
    }
    yield figures, text_of(figures, by_model)
    draw({"mean of all": figures["means"], **by_model}, options.output / "fidelity.png")


def _measure(kind: Architecture, task: Task, seed: int, options: Fidelity) -> tuple[Row, list[Row]]:
    """Train one model; return facts about it, and each curvature's errors."""
    folder = encoder_folder()  # for its tokenizer, not its weights
    settings = replace(LORA, model=kind.name, target_modules=kind.target_modules)
    settings = settings.for_epochs(options.epochs, len(task.validation), warmup=0)
    small = SmallModel(task, settings, load_tokenizer(folder), folder, options, kind, seed)
    train, test = small.records(task.validation), small.records(task.test)
    model = fine_tune(small, train, seed)
    # A Llama's norms still compute in float32, for all curvatures alike.
    model.model.double()
    weights = model.lora_weights
    sizes = [weight.numel() for weight in weights]
    # One text at a time, so that none is padded.
    (Js, logits), (test_Js, test_logits) = (
        exactly.jacobians(model.logits_model, weights, tqdm(alone, disable=options.quiet))
        for alone in (small.loader(train, 1), small.loader(test, 1))
    )
    labels, test_labels = (labels_of(small.loader(texts)) for texts in (train, test))
    curvature = exactly.DenseCurvature.of_softmax(Js, logits, sizes)
    flat = torch.cat([weight.detach().flatten() for weight in weights])
    prior_precision = exactly.evidence_prior_precision(curvature, flat)
    full = exactly.DenseCurvature.of_softmax(Js, logits, [sum(sizes)])
    full_covariance = full.covariance(test_Js, prior_precision)
    known = (curvature, full_covariance, test_Js, prior_precision)
    rows = []
    curvatures = list(all_curvatures(options.ranks, options.hidden_size))
    for method, settings in tqdm(curvatures, desc=kind.name, disable=options.quiet):
        la = method.build(model)
        la.fit(small.loader(train))
        la.optimize_prior_precision(method="marglik")
        found = exactly.DenseCurvature.of_fit(la.H, sizes)
        row = {"name": method.title, "structure": method.key, "is_default": settings == DEFAULTS}
        row |= {keyword: settings.get(keyword) for keyword in KEYWORDS}
        row |= exactly.errors(found, *known)
        row["own_prior_precision_ratio"] = la.prior_precision.item() / prior_precision
        rows.append({**row, "kilobytes": exactly.kilobytes_kept(la.H)})
    facts = {
        "weights": sum(sizes),
        "train_accuracy": (logits.argmax(-1) == labels).double().mean().item(),
        "train_nll": cross_entropy(logits, labels).item(),
        "test_accuracy": (test_logits.argmax(-1) == test_labels).double().mean().item(),
        "prior_precision": prior_precision,
        "full_covariance_error": exactly.errors(curvature, *known)["full_covariance_error"],
    }
    return facts, rows
