"""How close each curvature comes to the exact one, and what memory that takes."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from tqdm import tqdm

from benchmarks.docstrings import LIBRARIES, Example, read_splits
from benchmarks.exact_curvature import DenseCurvature, evidence_prior_precision, jacobians
from benchmarks.fidelity_contestants import (
    Contestant,
    all_contestants,
    approximate_posterior,
    errors,
    exact_posterior,
    fitted,
)
from benchmarks.fidelity_models import (
    ARCHITECTURES,
    LORA_BATCH_SIZE,
    Architecture,
    Collate,
    Record,
    train,
)
from benchmarks.fidelity_report import draw, means, report, verdict
from benchmarks.minilm import load_tokenizer, padding_collator, tokenize
from benchmarks.report import describe_machine, package_versions, settings_of, write_figures
from laplace_lora_ext.models.logits_model import LogitsModel

DEVICE = "cpu"
FILES_PER_LIBRARY = 200
MAXIMUM_LENGTH = 32


def fidelity(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark of fidelity.

    Parameters
    ----------
    arguments : argparse.Namespace
        Options of the command line: ``output``, ``seeds``, ``hidden_size``, ``ranks``,
        ``base_examples``, ``train_examples``, ``test_examples``, ``epochs``, ``threads`` and
        ``quiet``.

    Returns
    -------
    figures : dict
        Everything that was measured, as in fidelity.json.
    """
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    arguments.output.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    contestants = list(all_contestants(arguments.ranks, arguments.hidden_size))
    models: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        texts = _read_texts(arguments, seed)
        for architecture in ARCHITECTURES:
            labels = {"model": architecture.name, "seed": seed}
            model, measured = _measure(architecture, contestants, texts, seed, arguments)
            models.append(labels | model)
            rows += [labels | row for row in measured]

    overall = means(rows, contestants)
    by_model = {
        architecture.name: means(
            (row for row in rows if row["model"] == architecture.name), contestants
        )
        for architecture in ARCHITECTURES
    }
    judged = verdict(rows, contestants, overall)
    figures = {
        "settings": settings_of(arguments),
        "classes": list(LIBRARIES),
        "models": models,
        "curvatures": rows,
        "means": overall,
        "verdict": judged,
        "machine": {"device": DEVICE, **describe_machine(DEVICE)},
        "versions": package_versions(),
    }
    text = report(models, by_model, overall, judged)
    (arguments.output / "fidelity.md").write_text(text + "\n", encoding="utf-8")
    draw({"mean of all": overall, **by_model}, contestants, arguments.output / "fidelity.png")
    write_figures(figures, arguments.output / "fidelity.json")
    print(text)
    return figures


@dataclass(frozen=True)
class Texts:
    """Tokenized texts of one seed, of the same kind and disjoint.

    Attributes
    ----------
    base, train, test : list of dict
        For the training in full, for that of the LoRA weights, and for predictions.
    tokenizer : transformers.PreTrainedTokenizerBase
        Their tokenizer.
    collate : callable
        Records to a padded batch.
    """

    base: list[Record]
    train: list[Record]
    test: list[Record]
    tokenizer: Any
    collate: Collate

    def batches(self, records: list[Record], batch_size: int) -> DataLoader:
        """Batches of records in their order."""
        return DataLoader(records, batch_size=batch_size, collate_fn=self.collate)  # pyright: ignore[reportArgumentType]


def _read_texts(arguments: argparse.Namespace, seed: int) -> Texts:
    splits = read_splits(
        train_examples=arguments.base_examples,
        validation_examples=arguments.train_examples,
        test_examples=arguments.test_examples,
        shifted_examples=0,
        seed=seed,
        files_per_library=FILES_PER_LIBRARY,
        show_progress=not arguments.quiet,
    )
    tokenizer = load_tokenizer()

    def records(examples: Sequence[Example]) -> list[Record]:
        texts, labels = zip(*examples, strict=True)
        return tokenize(tokenizer, texts, labels, MAXIMUM_LENGTH)

    return Texts(
        records(splits.train),
        records(splits.validation),
        records(splits.test),
        tokenizer,
        padding_collator(tokenizer, DEVICE),
    )


def _measure(
    architecture: Architecture,
    contestants: Sequence[Contestant],
    texts: Texts,
    seed: int,
    arguments: argparse.Namespace,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train one model; return what it is like, and the errors of each contestant on it."""
    show_progress = not arguments.quiet
    model = train(
        architecture,
        arguments.hidden_size,
        texts.base,
        texts.train,
        texts.tokenizer,
        texts.collate,
        arguments.epochs,
        seed,
        show_progress,
    )
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sizes = [weight.numel() for weight in weights]
    title = f"Jacobians, {architecture.name}"
    (Js, logits, labels), (test_Js, test_logits, test_labels) = (
        _differentiated(model, weights, texts.batches(records, 1), title, show_progress)
        for records in (texts.train, texts.test)
    )
    curvature = DenseCurvature.of_softmax(Js, logits, sizes)
    prior_precision = evidence_prior_precision(
        curvature, torch.cat([weight.detach().flatten() for weight in weights])
    )
    exact = exact_posterior(curvature, test_Js, prior_precision)
    full = DenseCurvature.of_softmax(Js, logits, [sum(sizes)]).covariance(test_Js, prior_precision)

    rows = []
    loader = texts.batches(texts.train, LORA_BATCH_SIZE)
    for contestant in tqdm(
        contestants, desc=f"Fitting, {architecture.name}", disable=not show_progress
    ):
        la = fitted(contestant, model, loader)
        posterior = approximate_posterior(la, sizes, test_Js, prior_precision)
        rows.append({"name": contestant.name, **errors(posterior, exact, full, prior_precision)})
    facts = {
        "weights": sum(sizes),
        "train_accuracy": (logits.argmax(-1) == labels).double().mean().item(),
        "train_nll": cross_entropy(logits, labels).item(),
        "test_accuracy": (test_logits.argmax(-1) == test_labels).double().mean().item(),
        "prior_precision": prior_precision,
        "full_covariance_error": errors(exact, exact, full, prior_precision)[
            "full_covariance_error"
        ],
    }
    return facts, rows


def _differentiated(
    model: LogitsModel,
    weights: Sequence[torch.nn.Parameter],
    examples: DataLoader,
    title: str,
    show_progress: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Jacobians, logits and labels of texts, without padding."""
    progress = tqdm(examples, desc=title, disable=not show_progress)
    labels = torch.cat([example["labels"] for example in examples])
    return *jacobians(model, weights, progress), labels
