"""Rivals that train again, and predict with the one model that they have trained."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from peft import LoraConfig, LoraModel
from torch import Tensor
from torch.nn.functional import kl_div
from torch.utils.data import DataLoader

from benchmarks.methods.method import Members, ensemble
from benchmarks.models import AdaptedModel
from benchmarks.training import Recipe
from laplace_lora_ext.models.adapters import find_peft_model


def alone(recipe: Recipe, model: AdaptedModel, _: DataLoader) -> Members:
    """Train again from the same start on the same texts."""
    assert model.retrained is not None
    return Members.of([model.retrained(recipe)])


class MonteCLoRA(Recipe):
    """A distribution of lora_A while training (Sengupta et al., arXiv:2411.04358).

    PEFT has it: a training step has means of samples of lora_A, and a prediction lora_A
    itself. Twenty held-out texts have chosen scale and divergence.
    """

    def __init__(self, scale: float = 3e-2, divergence: float = 1e-4) -> None:
        self.scale = scale  # of the samples
        self.divergence = divergence  # its weight in the loss
        self.name = f"MonteCLoRA, scale {scale:g}, divergence {divergence:g}"

    def adapters(self, lora: LoraConfig) -> LoraConfig:
        """Add PEFT's sampler to every layer."""
        from peft import MontecloraConfig  # PEFT has it since 2026

        return replace(
            lora,
            monteclora_config=MontecloraConfig(
                sample_scaler=self.scale, kl_loss_weight=self.divergence
            ),
        )

    def loss(self, model: torch.nn.Module, batch: Any, labels: Tensor) -> Tensor:
        """Compute the mean loss of a batch, with PEFT's penalty."""
        layers = find_peft_model(model).base_model
        assert isinstance(layers, LoraModel)
        # PEFT's own trainers call it too.
        return super().loss(model, batch, labels) + layers._get_monteclora_loss()


class Distilled(Recipe):
    """A student of several models' mean probabilities.

    Source: Hinton et al., arXiv:1503.02531.
    """

    def __init__(self, teachers: Sequence[AdaptedModel]) -> None:
        self.teachers = teachers
        self.name = f"student of {len(teachers)} models"

    def loss(self, model: torch.nn.Module, batch: Any, labels: Tensor) -> Tensor:
        """Compute the divergence from the teachers' mean probabilities."""
        with torch.no_grad():
            of_teachers = [
                each.logits_model(batch).softmax(-1) for each in self.teachers
            ]
        targets = torch.stack(of_teachers).mean(0)
        return kl_div(model(batch).log_softmax(-1), targets, reduction="batchmean")


def distilled(model: AdaptedModel, train: DataLoader) -> Members:
    """Train a student of an ensemble of other seeds and this one."""
    return alone(Distilled(ensemble(model)), model, train)
