"""Recorded calls, and parts of a model that are computed again."""

from __future__ import annotations

import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import find_blocks
from laplace_lora_ext.passes import jacobians, record
from tests.support.dense import jacobians as dense_jacobians
from tests.support.families import CLASSIFIER, FAMILIES
from tests.support.family_examples import together
from tests.support.models import lora_model, ragged_batches, with_lora
from tests.support.posteriors import KFAC_APPROX, fitted

modeling_layers = pytest.importorskip("transformers.modeling_layers")


def checkpointing(model: nn.Module) -> nn.Module:
    """The model, whose user has left gradient checkpointing on."""
    model.get_base_model().gradient_checkpointing_enable()
    return model


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_posterior_with_checkpoints_is_the_one_without(kind, kfac_approx):
    whole = fitted(kind, kfac_approx=kfac_approx)
    parts = fitted(kind, kfac_approx=kfac_approx, model=checkpointing(lora_model(kind)))
    torch.testing.assert_close(parts.H.to_matrix(), whole.H.to_matrix(), rtol=1e-10, atol=1e-12)
    batch = ragged_batches()[0]
    torch.testing.assert_close(parts(batch), whole(batch), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["GPT-2", "BLOOM", "DeBERTa-v3", "Falcon", "T5", "Whisper"])
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

    def found():
        return jacobians(LogitsModel(model), find_blocks(model), batch)

    wanted = found()
    checkpointing(model)
    torch.testing.assert_close(found(), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_checkpointed", [True, False])
def test_inputs_are_let_go_and_computed_again(is_checkpointed):
    model = lora_model("bert")
    if is_checkpointed:
        checkpointing(model)
    blocks = find_blocks(model)
    inputs, runs = [], Counter()

    def hear(layer, args, _):
        runs[layer] += 1
        inputs.append(weakref.ref(args[0]))

    def n_held() -> int:
        """Tensors that a layer was given."""
        return len({id(of_call()) for of_call in inputs} - {id(None)})

    logits_model, batch = LogitsModel(model), ragged_batches()[0]
    jacobians(logits_model, blocks, batch)  # a first time, which finds whose rows are whose
    for block in blocks:
        block.layer.register_forward_hook(hear)
    most = 0

    def visit(rows) -> None:
        nonlocal most
        most = max(most, n_held())

    with record(logits_model, blocks, batch) as recording:
        held_by_the_graph = n_held()
        recording.backward_every_output(visit, create_graph=False)
        assert set(runs.values()) == {2 if is_checkpointed else 1}
    assert n_held() == 0
    n_layers, n_inputs = 2, 3  # the same for both lora_A, and one for each lora_B
    if is_checkpointed:
        assert held_by_the_graph == n_layers  # what each layer itself is given
        assert most < n_layers * n_inputs
    else:
        assert held_by_the_graph == most == n_layers * n_inputs


class Overwriting(modeling_layers.GradientCheckpointingLayer):
    """Changes its layer's input in place, after the layer has read it."""

    overwrites = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        return x.add_(self.first(x)) if self.overwrites else x + self.first(x)


class Classifier(nn.Module):
    """Overwriting layers, each computed again if it is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Overwriting(), Overwriting()])
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(x)


def test_overwritten_inputs_are_copied_each_time():
    model = with_lora(Classifier(), "first")
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1)).double()
    wanted = dense_jacobians(model, x)
    for layer in model.modules():
        if isinstance(layer, Overwriting):
            layer.overwrites = True
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = None
    Js, _ = jacobians(LogitsModel(model), find_blocks(model), x)
    torch.testing.assert_close(Js, wanted)


def test_hooks_of_the_users_that_change_what_layers_return_are_part_of_the_model():
    model = with_lora(Classifier(), "first")
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1)).double()
    for block in find_blocks(model):
        block.layer.register_forward_hook(lambda *called: 1.5 * called[-1])
        block.layer.register_forward_pre_hook(lambda _, args: (args[0].sin(),))
    Js, _ = jacobians(LogitsModel(model), find_blocks(model), x)
    torch.testing.assert_close(Js, dense_jacobians(model, x))


class OwnCheckpoints(nn.Module):
    """Computes a part again by its user's own call of PyTorch."""

    def __init__(self, uses_checkpoint: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 3)
        self.uses_checkpoint = uses_checkpoint

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x.exp()).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.uses_checkpoint:
            return self.last(checkpoint(self.part, x, use_reentrant=False))
        return self.last(self.part(x))


def test_checkpoints_of_the_users_own_change_nothing():
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1)).double()
    of_both = []
    for uses_checkpoint in (True, False):
        model = with_lora(OwnCheckpoints(uses_checkpoint), "first", "last")
        of_both.append(jacobians(LogitsModel(model), find_blocks(model), x))
    torch.testing.assert_close(*of_both)


def test_no_hook_is_left_where_a_pass_fails():
    model = checkpointing(lora_model("bert"))
    blocks = find_blocks(model)
    with pytest.raises(ValueError, match="input_ids"), record(LogitsModel(model), blocks, {"x": 1}):
        pass
    assert not any(block.layer._forward_hooks for block in blocks)
    assert not any(module.training for module in model.eval().modules())


def test_outputs_whose_gradient_is_asked_for_stay_differentiable():
    """Their graph has to be whole, so nothing is computed again."""
    model = checkpointing(lora_model("bert"))
    batch = ragged_batches()[0]
    Js, _ = jacobians(LogitsModel(model), find_blocks(model), batch, enable_backprop=True)
    assert Js.requires_grad
