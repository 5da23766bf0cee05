"""Models that overwrite or hook what their layers see."""

import pytest
import torch
from torch import nn

from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import find_blocks
from laplace_lora_ext.passes.derivatives import jacobians
from tests.support.dense import jacobians as dense_jacobians
from tests.support.models import pairs, with_lora


class Overwriting(nn.Module):
    """Changes its layer's input in place, after the layer has read it, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.overwrites = nn.Linear(5, 3), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        logits = self.first(x).tanh()
        if self.overwrites:
            x.add_(1)
        return logits * x.sum(-1, keepdim=True)


def test_a_model_that_overwrites_what_its_layers_were_given_is_refused():
    model, (x, _) = with_lora(Overwriting(), "first"), pairs()[0]
    Js, _ = jacobians(LogitsModel(model), find_blocks(model), x)
    torch.testing.assert_close(Js, dense_jacobians(model, x))
    model.overwrites = True
    with pytest.raises(NotImplementedError, match=r"overwrites .* first\.lora_A.*target_modules"):
        jacobians(LogitsModel(model), find_blocks(model), x)


def test_hooks_of_the_users_own_are_part_of_the_model():
    model, (x, _) = with_lora(Overwriting(), "first"), pairs()[0]
    for block in find_blocks(model):
        block.layer.register_forward_hook(lambda *called: 1.5 * called[-1])
        block.layer.register_forward_pre_hook(lambda _, args: (args[0].sin(),))
    Js, _ = jacobians(LogitsModel(model), find_blocks(model), x)
    torch.testing.assert_close(Js, dense_jacobians(model, x))


class _Stopped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, *_: torch.Tensor) -> None:
        """No gradient at all, which is not a gradient of zeros."""


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).tanh() + _Stopped.apply(self.first(x.sin()))


def test_calls_without_a_gradient_hold_back_no_other_call():
    model, (x, _) = with_lora(CalledTwice(), "first"), pairs()[0]
    Js, _ = jacobians(LogitsModel(model), find_blocks(model), x)
    weights = [block.weight.requires_grad_() for block in find_blocks(model)]
    rows = [torch.autograd.grad(f, weights, retain_graph=True) for f in model(x).flatten()]
    expected = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    torch.testing.assert_close(Js.flatten(0, 1), expected)
