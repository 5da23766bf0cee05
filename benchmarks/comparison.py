"""The main job: fine-tune one model, run every contestant on it, and report."""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.contestants import (
    PREDICTION_BATCH_SIZE,
    Contestant,
    Outcome,
    Task,
    all_contestants,
    compete_alone,
)
from benchmarks.docstrings import LIBRARIES, SHIFTED_LIBRARY
from benchmarks.metrics import quality, reliability, shift_detection
from benchmarks.minilm import predict_logits
from benchmarks.preparation import Prepared, prepare
from benchmarks.report import (
    describe_machine,
    draw_reliability,
    markdown_table,
    package_versions,
    settings_of,
    write_figures,
)


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the main job.

    Parameters
    ----------
    arguments : argparse.Namespace
        Options of the command line.

    Returns
    -------
    figures : dict
        Everything that was measured, as in figures.json.
    """
    prepared = prepare(arguments)
    splits, device = prepared.splits, prepared.device
    show_progress = not arguments.quiet
    test_labels = torch.tensor([record["labels"] for record in prepared.test])
    started = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        # PEFT's default may ask the network for the encoder's vocabulary.
        prepared.model.save_pretrained(folder, save_embedding_layers=False)
        task = Task(
            model_folder=Path(folder),
            number_of_classes=len(LIBRARIES),
            train=prepared.train,
            validation=prepared.validation,
            test=prepared.test,
            shifted=prepared.shifted,
            batch_size=arguments.batch_size,
            samples=arguments.samples,
            device=device,
            threads=arguments.threads,
            seed=arguments.seed,
            show_progress=show_progress,
        )
        contestants = all_contestants(arguments.prior_structure, arguments.link)
        rows = []
        for number, contestant in enumerate(contestants, start=1):
            if show_progress:
                print(f"{number}/{len(contestants)} {contestant.name}", file=sys.stderr)
            rows.append(_row(contestant, compete_alone(contestant, task), test_labels))

    contested = time.perf_counter() - started
    training = _training_figures(prepared)
    figures = {
        "settings": settings_of(arguments),
        "data": {
            "classes": list(LIBRARIES),
            "shifted": SHIFTED_LIBRARY,
            "train": len(splits.train),
            "validation": len(splits.validation),
            "test": len(splits.test),
            "shifted_texts": len(splits.shifted),
        },
        "training": training,
        "methods": rows,
        "seconds": {
            "reading": prepared.reading_seconds,
            "fine_tuning": prepared.training_seconds,
            "contestants": contested,
        },
        "machine": {"device": device, **describe_machine(device)},
        "versions": package_versions(),
    }
    report = _summary(figures) + "\n\n" + markdown_table(rows) + "\n"
    (arguments.output / "table.md").write_text(report, encoding="utf-8")
    draw_reliability(rows, arguments.output / "reliability.png")
    write_figures(figures, arguments.output / "figures.json")
    print(report)
    return figures


def _row(contestant: Contestant, outcome: Outcome, labels: torch.Tensor) -> dict[str, Any]:
    return {
        "name": contestant.name,
        **quality(outcome.test_probabilities, labels),
        **shift_detection(outcome.test_probabilities, outcome.shifted_probabilities),
        "fit_seconds": outcome.fit_seconds,
        "predict_seconds": outcome.predict_seconds,
        "peak_megabytes": outcome.peak_megabytes,
        "prediction_batch_size": contestant.prediction_batch_size,
        "chosen": outcome.settings,
        "reliability": reliability(outcome.test_probabilities, labels),
    }


def _training_figures(prepared: Prepared) -> dict[str, float]:
    """Measure how well the model knows its training texts, in evaluation mode."""
    loader = prepared.loader(prepared.train, PREDICTION_BATCH_SIZE)
    labels = torch.tensor([record["labels"] for record in prepared.train])
    figures = quality(predict_logits(prepared.model, loader).softmax(-1), labels)
    return {"train_accuracy": figures["accuracy"], "train_nll": figures["nll"]}


def _summary(figures: dict[str, Any]) -> str:
    """Say in a few lines what the table's figures were measured on."""
    data, machine, training = figures["data"], figures["machine"], figures["training"]
    hardware = machine["accelerator"] or f"{machine['processor']}, threads: {machine['threads']}"
    seconds = sum(figures["seconds"].values())
    return (
        f"MiniLM with LoRA, fine-tuned on {data['train']} docstrings "
        f"(training accuracy {training['train_accuracy']:.3f}, NLL {training['train_nll']:.4f}); "
        f"measured on {data['test']} docstrings of {', '.join(data['classes'])}\n"
        f"and, as shifted text, {data['shifted_texts']} of {data['shifted']}. "
        f"{hardware}; seed {figures['settings']['seed']}; {seconds:.0f} s in all."
    )
