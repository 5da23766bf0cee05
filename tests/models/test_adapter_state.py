"""A posterior is used with the model that it was fitted to, and with no other."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from laplace_lora_ext.models.adapter_state import fingerprint
from laplace_lora_ext.models.lora_layers import find_blocks
from tests.support.models import base_model, lora_model, ragged_batches
from tests.support.posteriors import STRUCTURES, fitted

USES = {
    "glm": lambda la, batches: la(batches[0]),
    "nn": lambda la, batches: la(batches[0], pred_type="nn", link_approx="mc", n_samples=2),
    "moments": lambda la, batches: la.predictive_moments(batches[0]),
    "functional samples": lambda la, batches: la.functional_samples(batches[0], n_samples=2),
    "more data": lambda la, batches: la.fit(batches, override=False),
}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("use", USES)
def test_weights_that_have_changed_since_the_fit_are_named(use, structure):
    la = fitted(structure=structure)
    USES[use](la, ragged_batches())
    la.blocks[3].weight.data[0, 0] += 1e-3  # seen by no version counter
    with pytest.raises(RuntimeError, match=rf"{la.blocks[3].name} have changed since the fit"):
        USES[use](la, ragged_batches())
    la.blocks[3].weight.data[0, 0] -= 1e-3
    la.fit(ragged_batches())
    USES[use](la, ragged_batches())


def test_statistics_of_changed_weights_are_refused():
    la = fitted()
    la.blocks[0].weight.data.mul_(1.01)
    for use in (la.predictive_statistics, lambda batches: la.variance_by_layer(batches[0])):
        with pytest.raises(RuntimeError, match="fit again"):
            use(ragged_batches())


@pytest.mark.parametrize("use", USES)
def test_another_scaling_is_named(use):
    la = fitted()
    la.blocks[2].owner.set_scale("default", 5.0)
    with pytest.raises(RuntimeError, match=r"scaling of .*value.lora_A.* was 2 at the fit"):
        USES[use](la, ragged_batches())


@pytest.mark.parametrize("use", USES)
def test_an_adapter_that_plays_no_part_is_refused(use):
    model = lora_model("bert")
    la = fitted(model=model)
    model.merge_adapter()
    with pytest.raises(RuntimeError, match=r"merged.*unmerge_adapter"):
        USES[use](la, ragged_batches())
    model.unmerge_adapter()
    la.fit(ragged_batches())  # unmerging leaves rounding errors in the base, and none here
    with model.disable_adapter(), pytest.raises(RuntimeError, match=r"disabled.*enable_adapter"):
        USES[use](la, ragged_batches())
    model.add_adapter("other", LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))
    model.set_adapter("other")
    with pytest.raises(RuntimeError, match=r"'default', which is not active.*set_adapter"):
        USES[use](la, ragged_batches())
    model.set_adapter("default")
    USES[use](la, ragged_batches())


@pytest.mark.parametrize("target", ["c_attn", "mlp.c_fc"])  # in the posterior's layers, or not
@pytest.mark.parametrize("use", USES)
def test_another_adapter_that_is_active_too_is_refused(use, target):
    model = lora_model("gpt2")
    config = LoraConfig(r=2, target_modules=[target], fan_in_fan_out=True, init_lora_weights=False)
    model.add_adapter("other", config)
    la = fitted("gpt2", model=model)
    model.base_model.set_adapter(["default", "other"])
    for refused in (USES[use], lambda la, batches: la.fit(batches)):
        with pytest.raises(RuntimeError, match=r"'default' alone, but in .*other is active"):
            refused(la, ragged_batches())
    model.set_adapter("default")
    USES[use](la, ragged_batches())


def unload(model):
    model.unload()


def replace(model):
    config = model.peft_config["default"]
    model.delete_adapter("default")
    model.add_adapter("default", config)
    model.set_adapter("default")


@pytest.mark.parametrize("change", [unload, replace])
@pytest.mark.parametrize("use", USES)
def test_weights_that_the_model_has_no_more_are_named(use, change):
    model = lora_model("gpt2")
    la = fitted("gpt2", model=model)
    change(model)
    for refused in (USES[use], lambda la, batches: la.fit(batches)):
        with pytest.raises(RuntimeError, match=rf"no longer in the model: {la.blocks[0].name}"):
            refused(la, ragged_batches())


def test_a_fit_says_why_an_adapter_plays_no_part():
    model = lora_model("bert")
    la = fitted(model=model)
    with model.disable_adapter(), pytest.raises(RuntimeError, match=r"is disabled: call"):
        la.fit(ragged_batches())
    model.merge_adapter()
    with pytest.raises(RuntimeError, match=r"is merged into the base model: call"):
        la.fit(ragged_batches())


def test_weights_in_half_precision_are_compared_as_they_are_kept():
    la = fitted(dtype=torch.bfloat16)
    assert torch.isfinite(la(ragged_batches()[0])).all()


def test_a_fingerprint_is_that_of_what_the_model_computes_with():
    model = lora_model("bert", torch.float32)
    before = fingerprint(find_blocks(model))
    assert before == fingerprint(find_blocks(lora_model("bert", torch.float32)))
    assert before == fingerprint(find_blocks(model.double()))
    blocks = find_blocks(model)
    weight = blocks[3].weight.data
    weight[0, 0] += 1e-6
    assert fingerprint(blocks) != before
    weight[0, 0] = find_blocks(lora_model("bert", torch.float32))[3].weight[0, 0]
    assert fingerprint(blocks) == before
    assert fingerprint(blocks[:-1]) != before
    blocks[2].owner.set_scale("default", 5.0)
    assert fingerprint(blocks) != before


def test_a_fingerprint_does_not_depend_on_the_adapters_name():
    names = []
    for name in ("default", "other"):
        torch.manual_seed(0)
        model = get_peft_model(base_model("bert"), LoraConfig(target_modules=["query"]), name)
        names.append(fingerprint(find_blocks(model)))
    assert names[0] == names[1]
