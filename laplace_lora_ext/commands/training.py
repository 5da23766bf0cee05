"""A trainer that shows a bar, and prints no figures that nobody asked for."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.data import Dataset
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainingArguments


class Bar(ProgressCallback):
    """Shows the steps of a training, without transformers' seconds and losses."""

    def on_log(self, *_: Any, **__: Any) -> None:
        """Write nothing."""


def trainer_with_bar(
    model: nn.Module,
    arguments: TrainingArguments,
    examples: Dataset[Any],
    **options: Any,
) -> Trainer:
    """Make a trainer that shows a bar; options are `transformers.Trainer`'s."""
    trainer = Trainer(model, arguments, train_dataset=examples, **options)
    # One of these is there; which one depends on the verbosity of transformers.
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(Bar)
    return trainer
