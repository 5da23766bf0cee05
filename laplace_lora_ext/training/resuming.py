"""Trains with a trainer, or reads what an interrupted run has trained already.

A mark in a training's folder says whose it is and what decides it, and once the
training has ended what its log is. So do marks in its checkpoints: a folder may hold
those of other runs, and may have been copied since.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from transformers import TrainerCallback

from laplace_lora_ext.models.adapters import (
    find_peft_model,
    read_adapter,
    write_adapter,
)
from laplace_lora_ext.processes.exchange import of_first
from laplace_lora_ext.saving import write_whole
from laplace_lora_ext.training.trainers import train

_MARK = "laplace_stage.json"
# Arguments of a trainer that decide what it learns, beside model and data.
_DECISIVE = (
    "seed",
    "data_seed",
    "max_steps",
    "num_train_epochs",
    "train_batch_size",
    "gradient_accumulation_steps",
    "optim",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
)

Log = list[dict[str, Any]]
"""What a trainer has logged."""


class MarkCheckpoints(TrainerCallback):
    """Marks each checkpoint with its run's name once it is whole."""

    def __init__(self, run: str) -> None:
        self.run = run

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the mark, last of all files of the checkpoint."""
        if args.should_save:
            checkpoint = Path(args.output_dir, f"checkpoint-{state.global_step}")
            _write(checkpoint, {"run": self.run, "step": state.global_step})


def forget(folder: Path) -> None:
    """Remove the mark of an earlier run, which nobody is to go on with."""
    (folder / _MARK).unlink(missing_ok=True)


def train_or_read(
    trainer: Any,
    examples: Any,
    share_of_steps: float,
    folder: Path,
    *,
    average: float,
    decided_by: Mapping[str, Any],
    resume: bool,
) -> Log:
    """Train and save the active adapter, or resume where a run stopped.

    `decided_by` is what decides the training beside the trainer's arguments: a run with
    other values is refused (`ValueError`). Returns the training's log.
    """
    model = find_peft_model(trainer.model)
    adapter = str(model.active_adapter)
    arguments = {name: getattr(trainer.args, name) for name in _DECISIVE}
    deciding = {**arguments, **decided_by, "share": share_of_steps, "average": average}
    # As text: types are lost in a file.
    deciding = {name: str(value) for name, value in deciding.items()}
    # Processes may see other files, where each machine has a disk of its own.
    mark, checkpoint = of_first(_begun(folder) if resume else (None, None))
    if mark is None:
        # A name that no other run has: checkpoints of an earlier one may lie in the
        # same folder.
        mark = {"run": of_first(uuid4().hex), "decided_by": deciding, "log": None}
        if trainer.args.should_save:
            _write(folder, mark)
    _check_alike(folder, mark["decided_by"], deciding)
    # The training had ended: there is nothing left but to read what it learnt.
    if mark["log"] is not None:
        read_adapter(model, adapter, folder)
        return mark["log"]
    train(
        trainer,
        examples,
        share_of_steps,
        folder,
        average=average,
        checkpoint=checkpoint,
        callbacks=[MarkCheckpoints(mark["run"])],
    )
    log = trainer.state.log_history
    if trainer.args.should_save:
        write_adapter(model, adapter, {}, folder)
        # Last: a log says that the adapter is whole.
        _write(folder, mark | {"log": log})
    return log


def _begun(folder: Path) -> tuple[dict[str, Any] | None, Path | None]:
    """Find a training's mark, and its last checkpoint that is whole."""
    if not (folder / _MARK).exists():
        return None, None
    mark = _read(folder)
    steps: dict[Path, int] = {}
    for path in folder.glob(f"checkpoint-*/{_MARK}"):
        of_checkpoint = _read(path.parent)
        if of_checkpoint["run"] == mark["run"]:
            steps[path.parent] = of_checkpoint["step"]
    return mark, max(steps, key=steps.__getitem__, default=None)


def _check_alike(
    folder: Path, before: Mapping[str, str], now: Mapping[str, str]
) -> None:
    """Refuse to go on with a training that another one has begun."""
    for name, value in now.items():
        if before.get(name) != value:
            raise ValueError(
                f"{folder} is of a training with {name}={before.get(name)}, and this "
                f"one has {value}: resume with the same trainer, data and options, or "
                "train anew without resuming."
            )


def _read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / _MARK).read_text(encoding="utf-8"))


def _write(folder: Path, content: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / _MARK, json.dumps(content).encode())
