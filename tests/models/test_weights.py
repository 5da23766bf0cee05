"""Weights that FSDP2 has sharded or Accelerate has offloaded."""

from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

from laplace_lora_ext import GridSearch
from laplace_lora_ext.models.lora_layers import find_blocks
from laplace_lora_ext.models.weights import parameters_with
from tests.support.dense import EXACT, full_rank
from tests.support.matrices import of_experts
from tests.support.models import first_batch, lora_model
from tests.support.posteriors import generator, make
from tests.support.ranks import assert_alike, on_ranks, strided_loader


def build(model: nn.Module, structure: str):
    """Make a posterior that leaves nothing out."""
    return make(model, structure, prior_precision=0.1, **full_rank(structure))


def facts(la: Any) -> dict[str, Tensor]:
    """Find what a fit, a prediction and a choice come to."""
    la.fit(strided_loader(12))
    found = {
        "evidence": la.log_marginal_likelihood().detach(),
        "prediction": la(first_batch()),
    }
    GridSearch(val_loader=strided_loader(12), optimize_scale=False, grid_size=5)(la)
    return found | {"prior precision": la.prior_precision}


def expected_facts(structure: str) -> dict[str, Tensor]:
    """Find what a model comes to whose weights are whole and at hand."""
    return facts(build(lora_model("bert"), structure))


def predict_by_draws(la: Any) -> Tensor:
    return la(first_batch(), pred_type="nn", n_samples=2, generator=generator())


def settings_of(model: nn.Module) -> dict[str, tuple]:
    """List what of each weight a pass may not change."""
    return {
        name: (weight.requires_grad, weight.device, weight.shape, weight.grad)
        for name, weight in model.named_parameters()
    }


def test_other_matrices_of_a_parameter_keep_their_values():
    model = of_experts().model
    first, *others = [b for b in find_blocks(model) if b.view is not None]
    alike = [each for each in others if each.weight is first.weight]
    assert alike
    before = first.weight.detach().clone()
    drawn = parameters_with([first], [torch.full(first.shape, 7.0)])
    (parameter,) = drawn.values()
    assert (first.matrix(parameter) == 7).all()
    for each in alike:
        assert torch.equal(each.matrix(parameter), each.values)
    assert torch.equal(first.weight, before)


# --- offloaded ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "structure"),
    [("disk", "lowrank_kron"), ("main memory", "diag"), ("main memory", "full")],
)
def test_offloaded_weights(tmp_path, where, structure):
    model = lora_model("bert")
    cpu = torch.device("cpu")
    # From where weights are fetched for each layer's pass.
    if where == "disk":
        accelerate.disk_offload(model, str(tmp_path), execution_device=cpu)
    else:
        accelerate.cpu_offload(model, execution_device=cpu)
        for block in find_blocks(model):  # beside a hook of the user's
            add_hook_to_module(block.module, ModelHook(), append=True)
    assert next(model.parameters()).is_meta
    before = settings_of(model)
    la = build(model, structure)
    assert_close(facts(la), expected_facts(structure), **EXACT)
    # The weights are elsewhere again, and can't be drawn.
    assert settings_of(model) == before
    with pytest.raises(NotImplementedError, match="whole LoRA weights"):
        predict_by_draws(la)
    if where == "main memory":
        # Where the hook fetches it from.
        la.blocks[2].values.add_(1)
        with pytest.raises(RuntimeError, match="have changed since the fit"):
            la(first_batch())


def test_variances_of_many_outputs_are_learnt_without_draws_of_offloaded_weights():
    model = lora_model("bert", n_labels=18)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    la = build(model, "lowrank_kron")
    la.fit([first_batch()])
    assert la.amortize([first_batch()], None).n_examples == 3


# --- in several processes -------------------------------------------------------------


def sharded(model: nn.Module, structure: str, leave_out: bool = False):
    """Make a posterior of a model that FSDP2 shards, perhaps without LoRA."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    of_lora = {w for name, w in model.named_parameters() if "lora_" in name}
    left_out = of_lora if leave_out else set()
    mesh = init_device_mesh("cpu", (2,))
    # Layers first: what is sharded already is no part of the whole model's shards.
    layers = model.base_model.model.bert.encoder.layer
    for part in (*layers, model):
        fsdp.fully_shard(part, mesh=mesh, ignored_params=left_out)
    return build(model, structure)


@pytest.mark.parametrize(
    ("structure", "checkpointed"),
    [
        ("lowrank_kron", ""),
        ("diag", ""),
        # As scripts for FSDP do, or by the model's own switch.
        ("full", "by wrappers"),
        ("lowrank_kron", "by the model"),
    ],
)
def test_sharded_weights(structure, checkpointed):
    def job(rank: int) -> dict[str, Tensor]:
        model = lora_model("bert")
        layers = model.base_model.model.bert.encoder.layer
        calls = []
        layers[0].attention.self.register_forward_hook(lambda *_: calls.append(1))
        for layer in layers:
            layer.gradient_checkpointing = checkpointed == "by the model"
            if checkpointed == "by wrappers":
                layer.attention = checkpoint_wrapper(layer.attention)
        la = sharded(model, structure)
        before = settings_of(la.model)
        found = facts(la)
        assert settings_of(la.model) == before
        if not checkpointed:
            with pytest.raises(NotImplementedError, match="Pass them to fully_shard"):
                predict_by_draws(la)
        calls.clear()
        la(first_batch())
        # Once more for each of three logits' backward passes, which sharded weights
        # take in turn.
        assert len(calls) == (1 + 3 if checkpointed else 1)
        return found

    assert_alike(on_ranks(job, 2), expected_facts(structure), **EXACT)


def test_a_sharded_base_with_whole_lora_weights():
    def job(rank: int) -> dict[str, Tensor]:
        # With these, every structure and draws of the weights are there as well.
        la = sharded(lora_model("bert"), "kron", leave_out=True)
        found = facts(la)
        predict_by_draws(la)
        return found

    assert_alike(on_ranks(job, 2), expected_facts("kron"), **EXACT)
