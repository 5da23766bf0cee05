"""Students that learn a teacher's probabilities, by `distill`."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import transformers
from peft import PeftModel
from torch import Tensor

from benchmarks.fine_tuning import TRAIN, Pretrained
from benchmarks.methods.method import Loaders, Probabilities
from benchmarks.models import AdaptedModel
from benchmarks.training import as_dataset
from laplace_lora_ext import LoRALaplace
from laplace_lora_ext.models.adapters import own_adapter_back


def tempered(la: LoRALaplace, temperature: float) -> Callable[[Any], Tensor]:
    """Return a model's probabilities at a temperature, in its posterior's place."""

    @torch.no_grad()
    def probabilities(batch: Any) -> Tensor:
        with la.model.prepared():
            logits = la.model(batch)
        return (logits / temperature).softmax(-1)

    return probabilities


def predict_with_student(
    model: PeftModel,
    teach: Callable[..., str],
    pretrained: Pretrained,
    seed: int,
    loaders: Loaders,
) -> Probabilities:
    """Train a student, predict with it, and delete it.

    `teach` is the `distill` of a posterior or a mixture around adapters of the model,
    or does the same.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(pretrained, model, seed, folder)
        name = teach(trainer, adapter_name="student")
    student = AdaptedModel(model, pretrained.class_token_ids)
    with own_adapter_back(model):
        model.set_adapter(name)
        model.eval()
        probabilities = student.probabilities(loaders)
    model.delete_adapter(name)
    return probabilities


def _trainer(
    pretrained: Pretrained, model: PeftModel, seed: int, folder: str
) -> transformers.Trainer:
    """Make a trainer with the settings of the lab's loop, without clipping."""
    settings = pretrained.hyperparameters
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=settings.steps,
        warmup_steps=settings.warmup_steps,
        learning_rate=settings.learning_rate,
        per_device_train_batch_size=settings.batch_size,
        max_grad_norm=0.0,
        lr_scheduler_type="linear",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        # Prompts and choices are columns that no model takes.
        remove_unused_columns=not pretrained.task.has_choices,
        use_cpu=not pretrained.device.startswith("cuda"),
        seed=seed,
    )
    return transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=as_dataset(pretrained.data[TRAIN]),
        data_collator=pretrained.collator,
    )
