"""Students: their training, and folders that others open without an option."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from peft import PeftConfig
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainingArguments,
)

from laplace_lora_ext.commands.loading import Loaded
from laplace_lora_ext.saving import write_whole

_KNOWS = "laplace_student.json"


class _Bar(ProgressCallback):
    """Shows the steps of a training, without transformers' seconds and losses."""

    def on_log(self, *_: Any, **__: Any) -> None:
        """Write nothing."""


def trainer_with_bar(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Any],
    output: Path,
    **options: Any,
) -> Trainer:
    """Make a trainer that shows a bar; options are those of `TrainingArguments`."""
    settings = TrainingArguments(
        output_dir=str(output),
        save_strategy="no",
        report_to=[],
        dataloader_pin_memory=False,  # asked for without an accelerator, a warning
        **options,
    )
    data = cast(Dataset[Any], rows)  # any sequence will do
    trainer = Trainer(model, settings, train_dataset=data, processing_class=tokenizer)
    # One of these is there; which one depends on the verbosity of transformers.
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(_Bar)
    return trainer


def write_student(loaded: Loaded, folder: Path, metadata: Mapping[str, Any]) -> None:
    """Complete a student's folder by what its teacher's file knows.

    Whoever opens an adapter reads the classes' names off the base model. Where that
    does not know them, a copy that does is written beside the adapter.
    """
    known = {key: value for key, value in metadata.items() if key != "held_out"}
    content = json.dumps(known, indent=2, ensure_ascii=False)
    write_whole(folder / _KNOWS, content.encode())
    config = loaded.model.config
    adapter = PeftConfig.from_pretrained(str(folder))
    name = str(adapter.base_model_name_or_path)
    if loaded.arguments.answers or _knows(name, config.id2label):
        return
    base = AutoModelForSequenceClassification.from_pretrained(
        name, config=config, dtype="auto"
    )
    base.save_pretrained(folder / "base")
    loaded.tokenizer.save_pretrained(folder / "base")
    adapter.base_model_name_or_path = str((folder / "base").resolve())
    adapter.save_pretrained(str(folder))


def _knows(base: str, id2label: Mapping[int, str]) -> bool:
    config = AutoConfig.from_pretrained(base)
    is_classifier = any("Classification" in name for name in config.architectures or ())
    return is_classifier and config.id2label == dict(id2label)


def write_merged(loaded: Loaded, adapter: str, folder: Path) -> None:
    """Write an ordinary model with a student's weights, and its tokenizer."""
    loaded.model.set_adapter(adapter)
    merged: Any = loaded.model.merge_and_unload()
    merged.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
