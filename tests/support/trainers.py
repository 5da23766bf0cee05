"""Trainers of the small models, and callbacks that watch or stop them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from tests.support.models import lora_model
from tests.support.ranks import Texts

N = 20


def trainer_of(
    folder: Path,
    *callbacks: TrainerCallback,
    model: nn.Module | None = None,
    data: Any = None,
    eval_data: Any = None,
    **settings: Any,
) -> Trainer:
    """Make a trainer of a tiny encoder with twenty texts and five steps."""
    defaults: dict[str, Any] = {
        "max_steps": 5,
        "save_steps": 1,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 5,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
    }
    trainer = Trainer(
        lora_model("bert", torch.float32) if model is None else model,
        TrainingArguments(output_dir=str(folder), **defaults | settings),
        callbacks=list(callbacks),
        train_dataset=Texts(N) if data is None else data,
        eval_dataset=eval_data,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class Watch(TrainerCallback):
    """Remembers each training's data, rates, and optimizer's memory."""

    def __init__(self) -> None:
        # A copy adds to the same lists.
        self.data: list[Any] = []
        self.steps: list[list[tuple[float, int]]] = []

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        self.data.append(train_dataloader.dataset)
        self.steps.append([])

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        rate = optimizer.param_groups[0]["lr"]
        self.steps[-1].append((rate, len(optimizer.state)))


class Stop(TrainerCallback):
    """Breaks off at a step, counted over all trainings."""

    def __init__(self, at: int) -> None:
        self.left = at

    def on_step_begin(self, args, state, control, **kwargs):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt("killed")


def values(model: nn.Module) -> dict[str, Tensor]:
    """Copy all weights, by name."""
    weights = model.state_dict()
    return {name: value.clone() for name, value in weights.items()}
