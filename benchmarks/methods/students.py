"""Students that learn a teacher's probabilities, by `distill`."""

import tempfile
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
from laplace_lora_ext.models.adapters import find_peft_model, own_adapter_back
from laplace_lora_ext.training.students import Teacher, distill


class Scaled:
    """A posterior's model at a temperature, to teach a student in its place."""

    likelihood = "classification"

    def __init__(self, la: LoRALaplace, temperature: float) -> None:
        self.model = la.model
        self.blocks = la.blocks
        self.members = [self]
        self.trained_likelihood = la.trained_likelihood
        self.predicted_likelihood = la.predicted_likelihood
        self.temperature = temperature

    @torch.no_grad()
    def __call__(
        self,
        x: Any,
        **_: Any,
    ) -> Tensor:
        """Compute probabilities (texts, classes)."""
        with self.model.prepared():
            logits = self.model(x)
        return (logits / self.temperature).softmax(-1)


def predict_with_student(
    teacher: Teacher,
    pretrained: Pretrained,
    unlabelled: str | None,
    seed: int,
    loaders: Loaders,
) -> Probabilities:
    """Train a student of a teacher, predict with it, and delete it.

    Teachers are posteriors, mixtures and `Scaled` models.
    """
    model = find_peft_model(teacher.members[0].model)  # that of all members
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(pretrained, model, seed, folder)
        name = distill(teacher, trainer, unlabelled, "student")
    student = AdaptedModel(model, pretrained.class_token_ids)
    with own_adapter_back(model):
        model.set_adapter(name)
        model.eval()
        probabilities = student.probabilities(loaders)
    model.delete_adapter(name)
    return probabilities


def _trainer(
    pretrained: Pretrained,
    model: PeftModel,
    seed: int,
    folder: str,
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
