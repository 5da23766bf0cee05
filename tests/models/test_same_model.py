"""A posterior is used with the model that it was fitted to, and with no other."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.testing import assert_close

from laplace_lora_ext import from_pretrained
from tests.support.models import (
    CLASS_TOKEN_IDS,
    VOCABULARY,
    TwoLinear,
    base_model,
    lora_model,
    pairs,
    ragged_batches,
    with_lora,
)
from tests.support.posteriors import STRUCTURES, fitted, make

USES = {
    "glm": lambda la, batches: la(batches[0]),
    "nn": lambda la, batches: la(batches[0], pred_type="nn", link_approx="mc", n_samples=2),
    "moments": lambda la, batches: la.predictive_moments(batches[0]),
    "functional samples": lambda la, batches: la.functional_samples(batches[0], n_samples=2),
    "more data": lambda la, batches: la.fit(batches, override=False),
    "statistics": lambda la, batches: la.predictive_statistics(batches).f_mu,
}
RANK = {"backend_kwargs": {"rank": 3}}


def adapter(la) -> torch.Tensor:
    return la.blocks[3].weight


def head(la) -> torch.Tensor:
    return la.model.model.base_model.model.classifier.modules_to_save["default"].weight


def base(la) -> torch.Tensor:
    return la.model.model.base_model.model.bert.encoder.layer[0].output.dense.weight


def outside(la) -> torch.Tensor:
    """A LoRA weight that is not in the posterior."""
    return query(la.model.model).lora_B["default"].weight


PARTS = {
    adapter: r"value\.lora_B\.default\.weight have changed since the fit: fit again",
    head: r"classifier\.modules_to_save\.weight differs from that of the fit: fit again",
    base: r"output\.dense\.weight differs from that of the fit",
    outside: r"query\.lora_B\.weight differs from that of the fit",
}


def only_values(structure: str = "lowrank_kron", **keywords):
    return fitted(structure=structure, target_modules=["value"], **keywords)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("part", PARTS)
def test_a_weight_that_has_changed_since_the_fit_is_named(part, structure):
    la = only_values(structure)
    batch, *_ = ragged_batches()
    weight = part(la)
    expected = la(batch)
    before = weight.detach().clone()
    weight.data[0, 0] += 1e-6  # seen by no version counter
    with pytest.raises(RuntimeError, match=PARTS[part]):
        la(batch)
    weight.data.copy_(before)
    assert torch.equal(la(batch), expected)
    la.fit(ragged_batches())
    la(batch)


def query(model):
    return model.base_model.model.bert.encoder.layer[0].attention.self.query


def replace(model):
    query(model).lora_A["default"] = nn.Linear(12, 2, bias=False).double()


def scale(model):
    query(model).set_scale("default", 3.0)


def replace_weight(model):
    layer = model.base_model.model.bert.pooler.dense
    layer.weight = nn.Parameter(layer.weight.detach() * 1.001)


@pytest.mark.parametrize(
    ("change", "message", "can_be_fitted"),
    [
        (lambda m: m.merge_adapter(), "query is merged into the base model: call", False),
        (lambda m: m.base_model.disable_adapter_layers(), "query is disabled: call", False),
        (lambda m: m.unload(), r"lost LoRA weights of the posterior: .*query\.lora_A", False),
        (replace, r"lost LoRA weights of the posterior: .*query\.lora_A", False),
        (scale, r"query\.lora_A.*was \(\[2, 12\], 2\.0\) at the fit, and now is .*6\.0", True),
        (replace_weight, r"bert\.pooler\.dense\.weight differs from that of the fit", True),
    ],
)
@pytest.mark.parametrize("use", USES)
def test_an_adapter_or_a_base_that_is_another_is_named(use, change, message, can_be_fitted):
    la = fitted()
    change(la.model.model)
    with pytest.raises(RuntimeError, match=message):
        USES[use](la, ragged_batches())
    if not can_be_fitted:
        with pytest.raises(RuntimeError, match=message):
            la.fit(ragged_batches())


def test_a_scaling_outside_the_posterior_counts_as_well(tmp_path):
    la = only_values()
    la.save_pretrained(tmp_path)
    scale(la.model.model)
    with pytest.raises(RuntimeError, match=r"scaling of .*self\.query was 2\.0 at the fit"):
        la(ragged_batches()[0])
    with pytest.raises(ValueError, match=r"scaling of .*self\.query was 2\.0 at the fit"):
        from_pretrained(la.model.model, tmp_path)


def test_running_averages_that_move_after_the_fit_are_named(tmp_path):
    batches = pairs(2)
    normed = nn.Sequential(nn.BatchNorm1d(5), TwoLinear())
    model = with_lora(normed, "first", "second")
    la = make(model)
    la.fit(batches)
    la(batches[0][0])
    la.save_pretrained(tmp_path)
    model.train()(batches[0][0])
    with pytest.raises(RuntimeError, match=r"0\.running_mean differs from that of the fit"):
        la(batches[0][0])
    with pytest.raises(ValueError, match=r"0\.running_mean differs from that of the fit"):
        from_pretrained(model, tmp_path)


# --- what is no change ---------------------------------------------------------------------------


def test_an_adapter_may_be_merged_and_unmerged():
    model = lora_model("bert", torch.float32)
    batch = ragged_batches()[0]
    la = fitted(model=model)
    expected = la(batch)
    for _ in range(3):
        model.merge_adapter()
        model.unmerge_adapter()
    assert_close(la(batch), expected, rtol=1e-5, atol=1e-6)


def active_of(model):
    """What is active in each layer, and what requires grad."""
    layers = [m.active_adapters for m in model.modules() if hasattr(m, "active_adapters")]
    return layers, [parameter.requires_grad for parameter in model.parameters()]


@pytest.mark.parametrize("target", ["query", "intermediate.dense"])  # in its layers, or not
@pytest.mark.parametrize("active", ["other", ["default", "other"]], ids=str)
@pytest.mark.parametrize("use", USES)
def test_a_posterior_runs_its_own_adapter_whichever_is_active(use, target, active):
    la = fitted()
    batches = ragged_batches()
    torch.manual_seed(0)
    expected = USES[use](la, batches)
    model = la.model.model
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=[target], init_lora_weights=False)
    model.add_adapter("other", config)
    model.base_model.model.classifier.modules_to_save["other"].weight.data.mul_(2)
    model.set_adapter("other")
    for layer in (m for m in model.modules() if isinstance(m, LoraLayer)):
        layer.set_adapter(active)
    before = active_of(model)
    torch.manual_seed(0)
    assert_close(USES[use](la, batches), expected)
    assert active_of(model) == before
    model.delete_adapter("other")
    model.set_adapter("default")
    la(batches[0])


# --- states --------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS)
def test_a_state_of_another_model_is_not_loaded(part):
    la = only_values()
    other = make(la.model.model, target_modules=["value"], **RANK)
    state = la.state_dict()
    part(other).data.add_(1e-6)
    message = "other LoRA weights" if part is adapter else PARTS[part].partition(":")[0]
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)
    assert other.n_data == 0


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("bert", {"target_modules": ["value"]}, r"query\.lora_A\.weight .* and now is None"),
        (
            "gpt2",
            {"class_token_ids": CLASS_TOKEN_IDS[::-1]},
            r"class_token_ids was \[11, 23, 42\] at the fit, and now is \[42, 23, 11",
        ),
    ],
)
def test_a_state_of_other_layers_or_answers_is_not_loaded(kind, settings, message):
    la = fitted(kind)
    with pytest.raises(ValueError, match=f"fitted to another model. .*{message}"):
        make(la.model.model, **settings, **RANK).load_state_dict(la.state_dict())


def test_a_state_is_loaded_under_another_name_of_the_adapter_and_another_precision_of_the_base():
    model = lora_model("bert", torch.float32)
    la = fitted(model=model)
    config = LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=4, target_modules=["query", "value"])
    renamed = get_peft_model(base_model("bert"), config, "renamed")
    weights = {k.replace(".default.", ".renamed."): v for k, v in model.state_dict().items()}
    renamed.load_state_dict(weights)
    renamed.base_model.model.bert.embeddings.bfloat16().float().bfloat16()
    other = make(renamed, **RANK)
    other.load_state_dict(la.state_dict())
    assert torch.equal(other.log_marginal_likelihood(), la.log_marginal_likelihood())
    renamed.base_model.model.bert.embeddings.word_embeddings.weight.data.add_(0.1)
    with pytest.raises(ValueError, match="word_embeddings"):
        other.load_state_dict(la.state_dict())


def test_a_base_with_weights_that_are_subnormal_in_float16_is_the_same_there(tmp_path):
    """Numbers there are 6e-8 apart, so that rounding moves small ones by much of their size."""
    model = lora_model("bert", torch.float32)
    embeddings = model.base_model.model.bert.embeddings.word_embeddings.weight
    embeddings.data[0, :3] = torch.tensor([5.1e-7, -8.7e-8, 2e-8])
    la = fitted(model=model)
    la.save_pretrained(tmp_path)
    for served in (model.base_model.model.bert.embeddings, model):
        served.half()
        assert from_pretrained(model, tmp_path).n_data == la.n_data
        la.check_model()
    model.base_model.model.bert.embeddings.word_embeddings.weight.data[0, 0] += 1.2e-7
    for use in (la.check_model, lambda: from_pretrained(model, tmp_path)):
        with pytest.raises((RuntimeError, ValueError), match=r"word_embeddings\.weight differs"):
            use()


@pytest.mark.parametrize("trained", [None, ["wte"]])
def test_resized_and_tied_embeddings_under_another_name_of_the_adapter(trained, tmp_path):
    def resized():
        torch.manual_seed(0)
        base = base_model("gpt2")
        base.resize_token_embeddings(VOCABULARY + 4)
        assert base.lm_head.weight is base.transformer.wte.weight
        return base.double()

    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=2,
        target_modules=["c_attn"],
        modules_to_save=trained,
        fan_in_fan_out=True,
    )
    model = get_peft_model(resized(), config, "trained")
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            parameter.data = parameter.data + torch.ones_like(parameter).cumsum(0).sin() / 3
    (batch,) = ragged_batches(batch_size=8)
    la = make(model.double(), class_token_ids=[11, VOCABULARY, VOCABULARY + 3], **RANK)
    la.fit([batch])
    model.save_pretrained(tmp_path)
    la.save_pretrained(tmp_path)
    served = PeftModel.from_pretrained(resized(), tmp_path / "trained", "served").double()
    loaded = from_pretrained(served, tmp_path)
    assert {block.adapter for block in loaded.blocks} == {"served"}
    assert_close(loaded(batch), la(batch), rtol=1e-6, atol=1e-9)
    served.get_input_embeddings().weight.data[0] += 0.1
    with pytest.raises(RuntimeError, match=r"(wte|lm_head).*weight differs from that of the fit"):
        loaded(batch)
