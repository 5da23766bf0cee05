"""Models that overwrite, hook or compute again what their layers see."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import find_blocks
from laplace_lora_ext.passes import jacobians
from tests.support.dense import jacobians as dense_jacobians
from tests.support.families import CLASSIFIER, FAMILIES
from tests.support.family_examples import together
from tests.support.models import lora_model, pairs, ragged_batches, with_lora
from tests.support.posteriors import fitted

modeling_layers = pytest.importorskip("transformers.modeling_layers")


def checkpointing(model: nn.Module) -> nn.Module:
    """The model, whose user has left gradient checkpointing on."""
    model.get_base_model().gradient_checkpointing_enable()
    return model


@pytest.mark.parametrize("kfac_approx", ["gradient", "expand"])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_posterior_with_checkpoints_is_the_one_without(kind, kfac_approx):
    whole = fitted(kind, kfac_approx=kfac_approx)
    parts = fitted(kind, kfac_approx=kfac_approx, model=checkpointing(lora_model(kind)))
    torch.testing.assert_close(parts.H.to_matrix(), whole.H.to_matrix(), rtol=1e-10, atol=1e-12)
    batch = ragged_batches()[0]
    torch.testing.assert_close(parts(batch), whole(batch), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["BLOOM", "DeBERTa-v3", "T5"])
def test_jacobians_with_checkpoints_are_those_without(name):
    """Of models that cache, share rows among examples, or have functions of their own."""
    family = FAMILIES[name]
    model = family.model(CLASSIFIER)
    batch = together(
        [
            {k: v.to(family.dtype) if v.is_floating_point() else v for k, v in example.items()}
            for example in family.examples(3)
        ],
        "right",
    )
    found = [
        jacobians(LogitsModel(each), find_blocks(each), batch)
        for each in (model, checkpointing(model))
    ]
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


class Overwriting(modeling_layers.GradientCheckpointingLayer):
    """Changes its layer's input in place, after the layer has read it, or not."""

    overwrites = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        return x.add_(self.first(x)) if self.overwrites else x + self.first(x)


class Classifier(nn.Module):
    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Overwriting(), Overwriting()])
        self.last = nn.Linear(5, 3)
        self.checkpoints = checkpoints  # by its user's own call of PyTorch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return self.last(x.tanh())


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_inputs_that_the_model_overwrites_are_those_that_its_layers_saw(is_checkpointed):
    model, (x, _) = with_lora(Classifier(), "first"), pairs()[0]
    wanted = dense_jacobians(model, x)
    for layer in model.layers:
        layer.overwrites, layer.gradient_checkpointing = True, is_checkpointed
        layer._gradient_checkpointing_func = None
    logits_model, passes = LogitsModel(model), []
    logits_model.register_forward_hook(lambda *_: passes.append(1))
    for _ in range(2):
        Js, _ = jacobians(logits_model, find_blocks(model), x)
        torch.testing.assert_close(Js, wanted)
    assert len(passes) == 2 + 1  # from then on it is known which inputs must be copied


def test_checkpoints_and_hooks_of_the_users_own_are_part_of_the_model():
    (x, _), of_both = pairs()[0], []
    for checkpoints in (False, True):
        model = with_lora(Classifier(checkpoints), "first")
        for block in find_blocks(model):
            block.layer.register_forward_hook(lambda *called: 1.5 * called[-1])
            block.layer.register_forward_pre_hook(lambda _, args: (args[0].sin(),))
        of_both.append(jacobians(LogitsModel(model), find_blocks(model), x)[0])
        torch.testing.assert_close(of_both[-1], of_both[0])
    model.checkpoints = False
    torch.testing.assert_close(of_both[0], dense_jacobians(model, x))
