"""A posterior is used with the model that it was fitted to, and with no other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_lora_ext import from_pretrained
from tests.support.models import (
    CLASS_TOKEN_IDS,
    VOCABULARY,
    TwoLinear,
    base_model,
    first_batch,
    lora_model,
    pairs,
    ragged_batches,
    with_lora,
)
from tests.support.posteriors import fitted, make, with_structures

# As of `fitted`, so that a state is refused for nothing but what a test changed.
RANK = {"backend_kwargs": {"rank": 3}}

# --- uses of a posterior --------------------------------------------------------------


def by_draws(la: Any, batches: list) -> Any:
    return la(batches[0], pred_type="nn", link_approx="mc", n_samples=2)


# More data last: they change the fit.
USES = [
    lambda la, batches: la(batches[0]),
    by_draws,
    lambda la, batches: la.predictive_moments(batches[0]),
    lambda la, batches: la.functional_samples(batches[0], n_samples=2),
    lambda la, batches: la.predictive_statistics(batches).f_mu,
    lambda la, batches: la.fit(batches, override=False),
]


def refuse_every_use(la: Any, message: str) -> None:
    batches = ragged_batches()
    for use in USES:
        with pytest.raises(RuntimeError, match=message):
            use(la, batches)


# --- parts of its model ---------------------------------------------------------------


def bert_of(model: PeftModel) -> nn.Module:
    return model.base_model.model.bert


def query(model: PeftModel) -> Any:
    return bert_of(model).encoder.layer[0].attention.self.query


def adapter(la: Any) -> Tensor:
    return la.blocks[3].weight


def head(la: Any) -> Tensor:
    classifier = la.model.model.base_model.model.classifier
    return classifier.modules_to_save["default"].weight


def base(la: Any) -> Tensor:
    layer = bert_of(la.model.model).encoder.layer[0]
    return layer.output.dense.weight


def outside(la: Any) -> Tensor:
    """Find a LoRA weight that is not in the posterior."""
    return query(la.model.model).lora_B["default"].weight


def only_values(structure: str = "lowrank_kron"):
    """Fit a posterior that leaves the queries' adapters out."""
    return fitted(structure=structure, target_modules=["value"])


# --- what is a change -----------------------------------------------------------------


DIFFERS = "weight differs from that of the fit"
PARTS = [
    (adapter, r"value\.lora_B\.default\.weight have changed since the fit: fit again"),
    (head, rf"classifier\.modules_to_save\.{DIFFERS}"),
    (base, rf"output\.dense\.{DIFFERS}"),
    (outside, rf"query\.lora_B\.{DIFFERS}"),
]


@pytest.mark.parametrize(("structure", "case"), with_structures(PARTS))
def test_a_weight_that_has_changed_since_the_fit_is_named(structure, case):
    part, message = case
    # So that there is a LoRA weight outside of the posterior, too.
    la = only_values(structure)
    batch = first_batch()
    weight = part(la)
    expected = la(batch)
    before = weight.detach().clone()
    # So little, and seen by no version counter.
    weight.data[0, 0] += 1e-6
    with pytest.raises(RuntimeError, match=message):
        la(batch)
    # Values are compared: put back, it is the same model.
    weight.data.copy_(before)
    found = la(batch)
    assert torch.equal(found, expected)
    # And it may be fitted again.
    la.fit(ragged_batches())
    la(batch)


def test_in_half_precision_the_least_change_is_one():
    la = fitted(model=lora_model("bert", torch.bfloat16))
    # By a unit or two in the last place.
    base(la).data[0, 0] *= 1.01
    with pytest.raises(RuntimeError, match=DIFFERS):
        la(first_batch())


def merge(model: PeftModel) -> None:
    model.merge_adapter()


def disable(model: PeftModel) -> None:
    model.base_model.disable_adapter_layers()


def unload(model: PeftModel) -> None:
    model.unload()


def replace(model: PeftModel) -> None:
    # Of the same shape, so that forward passes run.
    another = nn.Linear(12, 2, bias=False)
    query(model).lora_A["default"] = another.double()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (merge, "query is merged into the base model: call"),
        (disable, "query is disabled: call"),
        (unload, r"lost weights of the posterior: .*query\.lora_A"),
        (replace, r"lost weights of the posterior: .*query\.lora_A"),
    ],
)
def test_an_adapter_that_does_not_run_is_named_and_can_not_be_fitted(change, message):
    la = fitted()
    change(la.model.model)
    refuse_every_use(la, message)
    # Nor would a new fit help.
    with pytest.raises(RuntimeError, match=message):
        la.fit(ragged_batches())


def scale(model: PeftModel) -> None:
    # Times the scaling of 2 that the adapter has: 6.
    query(model).set_scale("default", 3.0)


def replace_weight(model: PeftModel) -> None:
    # By a parameter of its own, whose version begins anew.
    layer = bert_of(model).pooler.dense
    scaled = 1.001 * layer.weight.detach()
    layer.weight = nn.Parameter(scaled)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (scale, r"query\.lora_A.*was \(\[2, 12\], 2\.0\) .*, and now is .*6\.0"),
        (replace_weight, rf"bert\.pooler\.dense\.{DIFFERS}"),
    ],
)
def test_a_scale_or_a_base_that_is_another_is_named(change, message):
    la = fitted()
    change(la.model.model)
    refuse_every_use(la, message)


def test_a_scaling_outside_the_posterior_counts_as_well(tmp_path):
    la = only_values()
    la.save_pretrained(tmp_path)
    scale(la.model.model)
    message = r"scaling of .*self\.query was 2\.0 at the fit"
    with pytest.raises(RuntimeError, match=message):
        la(first_batch())
    with pytest.raises(ValueError, match=message):
        from_pretrained(la.model.model, tmp_path)


def test_running_averages_that_move_after_the_fit_are_named(tmp_path):
    batches = pairs(2)
    X, _ = batches[0]
    normed = nn.Sequential(nn.BatchNorm1d(5), TwoLinear())
    model = with_lora(normed, "first", "second")
    la = make(model)
    la.fit(batches)
    la(X)
    la.save_pretrained(tmp_path)
    # One pass in training mode, as an evaluation that forgot `eval` makes.
    model.train()
    model(X)
    message = r"0\.running_mean differs from that of the fit"
    with pytest.raises(RuntimeError, match=message):
        la(X)
    with pytest.raises(ValueError, match=message):
        from_pretrained(model, tmp_path)


def test_a_weight_that_is_computed_from_another_is_named():
    la = fitted()
    batch = first_batch()
    la(batch)
    layer = bert_of(la.model.model).pooler.dense
    nn.utils.parametrizations.weight_norm(layer)
    with pytest.raises(RuntimeError, match=r"pooler\.dense\.weight differs"):
        la(batch)


# --- what is no change ----------------------------------------------------------------


def test_an_adapter_may_be_merged_and_unmerged():
    model = lora_model("bert", torch.float32)
    batch = first_batch()
    la = fitted(model=model)
    expected = la(batch)
    # Each time rounds the base model's weights a little, which is no other model.
    for _ in range(3):
        model.merge_adapter()
        model.unmerge_adapter()
    found = la(batch)
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


def active_of(model: PeftModel) -> tuple[list[Any], list[bool]]:
    """Read what is active in each layer, and what requires grad."""
    active = []
    for module in model.modules():
        if hasattr(module, "active_adapters"):
            active.append(module.active_adapters)
    require_grad = [parameter.requires_grad for parameter in model.parameters()]
    return active, require_grad


def activate_another(model: PeftModel, target: str, active: str | list[str]) -> None:
    """Add an adapter "other" with a head of its own, and activate it."""
    config = LoraConfig(
        task_type="SEQ_CLS", r=2, target_modules=[target], init_lora_weights=False
    )
    model.add_adapter("other", config)
    head = model.base_model.model.classifier.modules_to_save["other"]
    head.weight.data.mul_(2)
    model.set_adapter("other")
    # Which PEFT's model does for one adapter alone.
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.set_adapter(active)


# In the posterior's layers, or not.
@pytest.mark.parametrize("target", ["query", "intermediate.dense"])
@pytest.mark.parametrize("active", ["other", ["default", "other"]], ids=str)
def test_a_posterior_runs_its_own_adapter_whichever_is_active(target, active):
    la, alone = fitted(), fitted()
    batches = ragged_batches()
    model = la.model.model
    activate_another(model, target, active)
    before = active_of(model)
    for use in USES:
        results = []
        for each in (la, alone):
            # Some uses draw.
            torch.manual_seed(0)
            results.append(use(each, batches))
        assert_close(*results)
        # Afterwards the user's choice is active again.
        assert active_of(model) == before
    model.delete_adapter("other")
    model.set_adapter("default")
    la(batches[0])


# --- states ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "message"), [(adapter, "other LoRA weights"), *PARTS[1:]]
)
def test_a_state_of_another_model_is_not_loaded(part, message):
    la = only_values()
    other = make(la.model.model, target_modules=["value"], **RANK)
    state = la.state_dict()
    part(other).data.add_(1e-6)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)
    # It was refused before anything was taken over.
    assert other.n_data == 0


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("bert", {"target_modules": ["value"]}, r"query\.lora_A\.weight .*is None"),
        (
            "gpt2",
            {"class_token_ids": CLASS_TOKEN_IDS[::-1]},
            r"class_token_ids was \[11, 23, 42\] .*, and now is \[42, 23, 11",
        ),
    ],
)
def test_a_state_of_other_layers_or_answers_is_not_loaded(kind, options, message):
    la = fitted(kind)
    other = make(la.model.model, **options, **RANK)
    with pytest.raises(ValueError, match=f"fitted to another model. .*{message}"):
        other.load_state_dict(la.state_dict())


def test_a_state_is_loaded_under_another_adapter_name_and_precision_of_the_base():
    model = lora_model("bert", torch.float32)
    la = fitted(model=model)
    config = LoraConfig(
        task_type="SEQ_CLS", r=2, lora_alpha=4, target_modules=["query", "value"]
    )
    renamed = get_peft_model(base_model("bert"), config, "renamed")
    weights = {}
    for name, value in model.state_dict().items():
        weights[name.replace(".default.", ".renamed.")] = value
    renamed.load_state_dict(weights)
    embeddings = bert_of(renamed).embeddings
    # There, back, and there again.
    embeddings.bfloat16().float().bfloat16()
    other = make(renamed, **RANK)
    other.load_state_dict(la.state_dict())
    found = other.log_marginal_likelihood()
    expected = la.log_marginal_likelihood()
    assert torch.equal(found, expected)
    # And back, onto weights that nothing has rounded.
    make(model, **RANK).load_state_dict(other.state_dict())
    # More than bfloat16 would have rounded away.
    embeddings.word_embeddings.weight.data.add_(0.1)
    with pytest.raises(ValueError, match="word_embeddings"):
        other.load_state_dict(la.state_dict())


def test_a_base_with_weights_that_are_subnormal_in_float16_is_the_same_there(tmp_path):
    """Numbers there are 6e-8 apart, so that rounding moves small ones much."""
    model = lora_model("bert", torch.float32)
    embeddings = bert_of(model).embeddings
    small = torch.tensor([5.1e-7, -8.7e-8, 2e-8])
    embeddings.word_embeddings.weight.data[0, :3] = small
    la = fitted(model=model)
    la.save_pretrained(tmp_path)
    # First a part of the model, then all of it.
    for served in (embeddings, model):
        served.half()
        loaded = from_pretrained(model, tmp_path)
        assert loaded.n_data == la.n_data
        la.check_model()
    # Two of float16's steps there: more than rounding.
    embeddings.word_embeddings.weight.data[0, 0] += 1.2e-7
    with pytest.raises(RuntimeError, match=r"word_embeddings\.weight differs"):
        la.check_model()
    with pytest.raises(ValueError, match=r"word_embeddings\.weight differs"):
        from_pretrained(model, tmp_path)


def resized() -> nn.Module:
    """Make a GPT-2 with four more tokens, whose output layer is its embedding."""
    torch.manual_seed(0)
    base = base_model("gpt2")
    base.resize_token_embeddings(VOCABULARY + 4)
    assert base.lm_head.weight is base.transformer.wte.weight
    return base.double()


def trained_on_resized(modules_to_save: list[str] | None) -> PeftModel:
    """Make what a training of an adapter, and perhaps of the embedding, ends with."""
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=2,
        target_modules=["c_attn"],
        modules_to_save=modules_to_save,
        fan_in_fan_out=True,
    )
    model = get_peft_model(resized(), config, "trained")
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            # Another number in each row, so that no token passes for another.
            waves = torch.ones_like(parameter).cumsum(0).sin()
            parameter.data = parameter.data + waves / 3
    return model.double()


def served(folder: Path) -> PeftModel:
    """Load the adapter of a folder under another name."""
    model = PeftModel.from_pretrained(resized(), folder / "trained", "served")
    return model.double()


OLD_AND_NEW_TOKENS = [11, VOCABULARY, VOCABULARY + 3]


@pytest.mark.parametrize("modules_to_save", [None, ["wte"]])
def test_resized_and_tied_embeddings_under_another_name_of_the_adapter(
    modules_to_save, eight_texts, tmp_path
):
    model = trained_on_resized(modules_to_save)
    la = make(model, class_token_ids=OLD_AND_NEW_TOKENS, **RANK)
    la.fit([eight_texts])
    model.save_pretrained(tmp_path)
    la.save_pretrained(tmp_path)

    other = served(tmp_path)
    loaded = from_pretrained(other, tmp_path)
    for block in loaded.blocks:
        assert block.adapter == "served"
    found = loaded(eight_texts)
    expected = la(eight_texts)
    assert_close(found, expected, rtol=1e-6, atol=1e-9)
    other.get_input_embeddings().weight.data[0] += 0.1
    message = r"(wte|lm_head).*weight differs from that of the fit"
    with pytest.raises(RuntimeError, match=message):
        loaded(eight_texts)
