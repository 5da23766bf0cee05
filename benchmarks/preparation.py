"""What every benchmark begins with: real texts, and a model fine-tuned on them."""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch.utils.data import DataLoader

from benchmarks.docstrings import LIBRARIES, Example, Splits, read_splits
from benchmarks.minilm import by_length, fine_tune, load_tokenizer, padding_collator, tokenize


@dataclass(frozen=True)
class Prepared:
    """A fine-tuned model and the tokenized texts of a benchmark.

    Attributes
    ----------
    splits : Splits
        The texts as they were read.
    train, validation, test, shifted : list of dict
        Records of tokens, and labels but for shifted texts; the last two sorted by length.
    model : PeftModel
        Fine-tuned on the training texts.
    collate : callable
        Records to a padded batch on the device.
    device : str
        Device of the model.
    reading_seconds, training_seconds : float
        Time for reading the texts and for fine-tuning.
    """

    splits: Splits
    train: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    test: list[dict[str, Any]]
    shifted: list[dict[str, Any]]
    model: PeftModel
    collate: Callable[[list[dict[str, Any]]], Any]
    device: str
    reading_seconds: float
    training_seconds: float

    def loader(self, records: list[dict[str, Any]], batch_size: int) -> DataLoader:
        """Batches of records in their order."""
        return DataLoader(records, batch_size=batch_size, collate_fn=self.collate)  # pyright: ignore[reportArgumentType]


def prepare(arguments: argparse.Namespace) -> Prepared:
    """Read texts and fine-tune the encoder on them.

    Parameters
    ----------
    arguments : argparse.Namespace
        Options of the command line.

    Returns
    -------
    prepared : Prepared
        The model and the texts.
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
    return Prepared(
        splits=splits,
        train=train,
        validation=records(splits.validation),
        test=by_length(records(splits.test)),
        shifted=by_length(tokenize(tokenizer, splits.shifted, None, arguments.maximum_length)),
        model=model,
        collate=collate,
        device=device,
        reading_seconds=read - started,
        training_seconds=time.perf_counter() - read,
    )
