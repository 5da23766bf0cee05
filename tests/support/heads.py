"""Classifiers with an adapter and a trained head."""

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from tests.support.cases import Case
from tests.support.models import N_CLASSES, built, lora_model, pairs, ragged_batches

PARTS = ("lora_", ".modules_to_save.default.")
"""What is in the names of the adapter's weights, heads included."""


class WithHead(nn.Module):
    """An encoder and a head of three linear layers, with and without biases."""

    def __init__(self, n_outputs: int = N_CLASSES, n_inputs: int = 5) -> None:
        super().__init__()
        # Before the encoder: blocks come in the order of the parameters, whatever their
        # kind.
        self.head = nn.Sequential(
            nn.Linear(6, 4),
            nn.Tanh(),
            nn.Linear(4, 4, bias=False),
            nn.Tanh(),
            nn.Linear(4, n_outputs),
        )
        self.encoder = nn.Linear(n_inputs, 6)

    def forward(self, x: Tensor) -> Tensor:
        features = self.encoder(x)
        return self.head(features.tanh())


def plain(n_outputs: int = N_CLASSES) -> PeftModel:
    """Make a plain module with a head of three layers, in float64."""
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["encoder"], modules_to_save=["head"])
    return trained(WithHead(n_outputs), config)


def trained(base: nn.Module, config: LoraConfig) -> PeftModel:
    """Add an adapter and a head, and draw all their weights, in float64."""
    torch.manual_seed(0)
    model = get_peft_model(base, config)  # pyright: ignore[reportArgumentType]
    for weight in weights_of(model).values():
        nn.init.normal_(weight, std=0.4)
    assert isinstance(model, PeftModel)
    return model.double().eval()


def weights_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Find the weights of adapter and head, in the order of the parameters."""
    weights = {}
    for name, weight in model.named_parameters():
        takes_part = any(part in name for part in PARTS)
        if takes_part:
            weights[name] = weight
    return weights


def classifier(name: str, target_modules: list[str]) -> PeftModel:
    """Make a one-layer classifier whose head PEFT trains by itself."""
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=target_modules)
    return trained(built(name), config)


def roberta() -> PeftModel:
    """Make a classifier whose head has two layers with biases."""
    return classifier("RobertaForSequenceClassification", ["query", "value"])


def gpt_neox() -> PeftModel:
    """Make a classifier with a head that all tokens go through."""
    return classifier("GPTNeoXForSequenceClassification", ["query_key_value"])


def with_head(model: nn.Module, batches: list[Any]) -> Case:
    """Let a model's head take part."""
    keywords = {"modules_to_save": True}
    return Case(model.eval(), batches, keywords, names=PARTS)


HEADS: dict[str, Callable[[], Case]] = {
    "a head of one layer": lambda: with_head(lora_model("bert"), ragged_batches()),
    "a head of two layers": lambda: with_head(roberta(), ragged_batches()),
    "a head of a plain module": lambda: with_head(plain(), pairs(2)),
    "a head for all tokens": lambda: with_head(gpt_neox(), ragged_batches()),
}
