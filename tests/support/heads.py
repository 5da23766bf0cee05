"""A small classifier with an adapter and a trained head, and dense calculus."""

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from tests.support.dense import jacobians_in, logits_of
from tests.support.models import N_CLASSES

PARTS = ("lora_", ".modules_to_save.default.")
"""What is in the names of the adapter's weights, heads included."""


class WithHead(nn.Module):
    """An encoder and a head of three linear layers, with and without biases."""

    def __init__(
        self,
        n_outputs: int = N_CLASSES,
        n_inputs: int = 5,
    ) -> None:
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
    config = LoraConfig(
        r=2,
        target_modules=["encoder"],
        modules_to_save=["head"],
    )
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


def dense_of(
    model: nn.Module,
    examples: list[Any],
) -> tuple[Tensor, Tensor]:
    """Compute logits `(N, C)` and Jacobians `(N, C, parameters)`, alone each."""
    weights = {}
    for name, weight in weights_of(model).items():
        weights[name] = weight.detach()
    logits = []
    Js = []
    for example in examples:
        of_example = logits_of(model, example)
        J = jacobians_in(weights, model, example)
        logits.append(of_example.detach())
        Js.append(J)
    return torch.stack(logits), torch.cat(Js)
