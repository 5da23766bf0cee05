"""The main job: fine-tune one model, run every contestant on it, and report."""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch.utils.data import DataLoader

from benchmarks.contestants import (
    PREDICTION_BATCH_SIZE,
    Contestant,
    Outcome,
    Task,
    all_contestants,
    compete_alone,
)
from benchmarks.docstrings import LIBRARIES, SHIFTED_LIBRARY, Example, read_splits
from benchmarks.metrics import quality, reliability, shift_detection
from benchmarks.minilm import (
    by_length,
    fine_tune,
    load_tokenizer,
    padding_collator,
    predict_logits,
    tokenize,
)
from benchmarks.report import (
    describe_machine,
    draw_reliability,
    markdown_table,
    package_versions,
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
    started = time.perf_counter()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    show_progress = not arguments.quiet
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    arguments.output.mkdir(parents=True, exist_ok=True)

    splits = read_splits(
        arguments.train_examples,
        arguments.validation_examples,
        arguments.test_examples,
        arguments.shifted_examples,
        arguments.seed,
        arguments.files_per_library,
        show_progress,
    )
    read = time.perf_counter()

    tokenizer = load_tokenizer()
    collate = padding_collator(tokenizer, device)

    def records(examples: Sequence[Example]) -> list[dict[str, Any]]:
        texts, labels = zip(*examples, strict=True)
        return tokenize(tokenizer, texts, labels, arguments.maximum_length)

    train = records(splits.train)
    test = by_length(records(splits.test))
    test_labels = torch.tensor([record["labels"] for record in test])
    model = fine_tune(
        DataLoader(
            train,  # pyright: ignore[reportArgumentType]
            batch_size=arguments.batch_size,
            shuffle=True,
            collate_fn=collate,
            generator=torch.Generator().manual_seed(arguments.seed),
        ),
        len(LIBRARIES),
        arguments.epochs,
        arguments.learning_rate,
        device,
        arguments.seed,
        show_progress,
    )
    trained = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        # PEFT's default may ask the network for the encoder's vocabulary.
        model.save_pretrained(folder, save_embedding_layers=False)
        task = Task(
            model_folder=Path(folder),
            number_of_classes=len(LIBRARIES),
            train=train,
            validation=records(splits.validation),
            test=test,
            shifted=by_length(tokenize(tokenizer, splits.shifted, None, arguments.maximum_length)),
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

    training = _training_figures(model, train, collate)
    figures = {
        "settings": {
            key: value for key, value in vars(arguments).items() if key not in {"output", "quiet"}
        },
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
            "reading": read - started,
            "fine_tuning": trained - read,
            "contestants": time.perf_counter() - trained,
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


def _training_figures(
    model: PeftModel, train: list[dict[str, Any]], collate: Any
) -> dict[str, float]:
    """Measure how well the model knows its training texts, in evaluation mode."""
    loader = DataLoader(train, batch_size=PREDICTION_BATCH_SIZE, collate_fn=collate)  # pyright: ignore[reportArgumentType]
    labels = torch.tensor([record["labels"] for record in train])
    figures = quality(predict_logits(model, loader).softmax(-1), labels)
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
