"""A posterior is used with the model that it was fitted to, and with no other."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import nn
from torch.testing import assert_close

from laplace_lora_ext import from_pretrained
from laplace_lora_ext.models.lora_layers import adapter_layers
from laplace_lora_ext.models.same_model import Weight
from tests.support.models import (
    CLASS_TOKEN_IDS,
    TwoLinear,
    base_model,
    first_batch,
    head_of,
    lora_model,
    pairs,
    ragged_batches,
    with_lora,
)
from tests.support.posteriors import fitted, make
from tests.support.snapshots import Snapshot

# As of `fitted`, so that a state is refused for nothing but what a test changed.
RANK = {"backend_kwargs": {"rank": 3}}

# --- uses of a posterior --------------------------------------------------------------


# More data last: they change the fit.
USES = [
    lambda la, batches: la(batches[0]),
    lambda la, batches: la(batches[0], pred_type="nn", n_samples=2),
    lambda la, batches: [*la.predictive_moments(batches[0])],
    lambda la, batches: la.functional_samples(batches[0], n_samples=2),
    lambda la, batches: la.predictive_statistics(batches).f_mu,
    lambda la, batches: la.fit(batches, override=False),
]


# --- what is a change -----------------------------------------------------------------


def bert_of(model: PeftModel) -> nn.Module:
    return model.base_model.model.bert


def query(model: PeftModel) -> Any:
    return bert_of(model).encoder.layer[0].attention.self.query


def dense_of(model: PeftModel) -> nn.Linear:
    return bert_of(model).encoder.layer[0].output.dense


def only_values():
    """Fit a posterior that leaves the queries' adapters out."""
    return fitted(target_modules=["value"])


DIFFERS = "weight differs from that of the fit"
PARTS = [
    (
        lambda la: la.blocks[3].weight,
        r"value\.lora_B\.default\.weight have changed since the fit: fit again",
    ),
    (
        lambda la: head_of(la.model.model).weight,
        rf"classifier\.modules_to_save\.{DIFFERS}",
    ),
    (lambda la: dense_of(la.model.model).weight, rf"output\.dense\.{DIFFERS}"),
    # A LoRA weight that is not in the posterior.
    (
        lambda la: query(la.model.model).lora_B["default"].weight,
        rf"query\.lora_B\.{DIFFERS}",
    ),
]


@pytest.mark.parametrize(("part", "message"), PARTS)
def test_a_weight_that_has_changed_since_the_fit_is_named(batch, part, message):
    la = only_values()
    weight = part(la)
    expected = la(batch)
    state = la.state_dict()
    before = weight.detach().clone()
    # So little, and seen by no version counter.
    weight.data[0, 0] += 1e-6
    with pytest.raises(RuntimeError, match=message):
        la(batch)
    # Values are compared: put back, it is the same model.
    weight.data.copy_(before)
    assert torch.equal(la(batch), expected)
    # And it may be fitted again.
    weight.data[0, 0] += 1e-6
    la.fit(ragged_batches())
    la(batch)
    # Which the state of the former fit is not loaded into.
    with pytest.raises(ValueError, match=r"other LoRA weights|differs from that"):
        la.load_state_dict(state)


def test_any_number_of_a_weight_that_changes_in_place_is_seen(la, batch):
    la(batch)
    with torch.no_grad():
        la.blocks[0].weight[-1, -1] += 1e-6
    with pytest.raises(RuntimeError, match="have changed since the fit"):
        la(batch)


def test_numbers_from_all_over_a_weight_are_compared_with_a_files(la):
    state = la.state_dict()
    dense_of(la.model.model).weight.data[-1] += 1
    with pytest.raises(ValueError, match=DIFFERS):
        la.load_state_dict(state)


def test_a_merge_that_is_undone_rounds_and_a_training_does_more():
    def weight(factor: float, dtype: str = "float32") -> Weight:
        sample = torch.tensor([1.0, -0.5]).double() * factor
        return Weight(f"torch.{dtype}", [2], sample)

    rounding = torch.finfo(torch.float32).eps
    assert weight(1).equals(weight(1 + 10 * rounding))
    assert not weight(1).equals(weight(1 + 30 * rounding))
    # In half precision the least change is one.
    assert not weight(1, "bfloat16").equals(weight(1 + 2**-7, "bfloat16"))


def scale(model: PeftModel) -> None:
    # Times the scaling of 2 that the adapter has: 6.
    query(model).set_scale("default", 3.0)


def replace(model: PeftModel) -> None:
    # Of the same shape, so that forward passes run.
    query(model).lora_A["default"] = nn.Linear(12, 2, bias=False).double()


def replace_weight(model: PeftModel) -> None:
    # By a parameter of its own, whose version begins anew.
    layer = dense_of(model)
    layer.weight = nn.Parameter(1.001 * layer.weight.detach())


def compute_weight(model: PeftModel) -> None:
    nn.utils.parametrizations.weight_norm(dense_of(model))


# What is done, what is said, and whether the model can be fitted as it is then.
CHANGES = [
    (lambda model: model.merge_adapter(), "query is merged .*: call", False),
    (
        lambda model: model.base_model.disable_adapter_layers(),
        "query is disabled: call",
        False,
    ),
    (lambda model: model.unload(), r"lost weights .*query\.lora_A", False),
    (replace, r"lost weights .*query\.lora_A", False),
    (scale, r"query\.lora_A.*was \[\[2, 12\], 2\.0\] .*6\.0", True),
    (replace_weight, rf"output\.dense\.{DIFFERS}", True),
    (compute_weight, r"output\.dense\.weight differs", True),
]


@pytest.mark.parametrize(("change", "message", "fits"), CHANGES)
def test_a_model_that_is_another_is_named_by_every_use(la, change, message, fits):
    change(la.model.model)
    batches = ragged_batches()
    for use in USES:
        with pytest.raises(RuntimeError, match=message):
            use(la, batches)
    if fits:
        la.fit(batches)
    else:
        # Nor would a new fit help.
        with pytest.raises(RuntimeError, match=message):
            la.fit(batches)


def test_a_merged_adapter_is_refused_where_no_number_that_is_looked_at_has_moved():
    model = lora_model("bert")
    for layer in adapter_layers(model).values():
        layer.lora_B["default"].weight.data[0] = 0
    la = fitted(model=model)
    model.merge_adapter()
    with pytest.raises(RuntimeError, match="is merged"):
        la(first_batch())
    model.unmerge_adapter()  # which rounds, and makes no other model
    la(first_batch())


def test_a_scaling_outside_the_posterior_counts_as_well(tmp_path):
    la = only_values()
    la.save_pretrained(tmp_path)
    scale(la.model.model)
    message = r"scaling of .*self\.query was 2\.0 at the fit"
    with pytest.raises(RuntimeError, match=message):
        la(first_batch())
    with pytest.raises(ValueError, match=message):
        from_pretrained(la.model.model, tmp_path)


def test_running_averages_that_move_after_the_fit_are_named():
    batches = pairs(2)
    X, _ = batches[0]
    normed = nn.Sequential(nn.BatchNorm1d(5), TwoLinear())
    normed.register_buffer("frequencies", torch.ones(1), persistent=False)
    model = with_lora(normed, "first", "second")
    la = make(model)
    la.fit(batches)
    normed.frequencies += 1  # as RoPE does for long texts
    la(X)
    # One pass in training mode, as an evaluation that forgot `eval` makes.
    model.train()
    model(X)
    with pytest.raises(RuntimeError, match=r"0\.running_mean differs from that of"):
        la(X)


# --- what is no change ----------------------------------------------------------------


def test_what_a_head_replaces_is_no_part_of_the_model(la):
    state = la.state_dict()
    classifier = la.model.model.base_model.model.classifier
    classifier.original_module.weight.data.add_(1)
    la.check_model()
    la.load_state_dict(state)


# In the posterior's layers, or not.
@pytest.mark.parametrize(
    ("target", "active"),
    [("query", ["other"]), ("intermediate.dense", ["default", "other"])],
)
def test_a_posterior_runs_its_own_adapter_whichever_is_active(target, active):
    la, alone = fitted(), fitted()
    batches = ragged_batches()
    model = la.model.model
    config = LoraConfig(r=2, target_modules=[target], init_lora_weights=False)
    config.modules_to_save = ["classifier"]
    config.trainable_token_indices = [1, 3]
    model.add_adapter("other", config)
    model.set_adapter("other")
    model.base_model.model.classifier.modules_to_save["other"].weight.data.mul_(2)
    layers = adapter_layers(model).values()
    # Which PEFT's model does for one adapter alone.
    for layer in layers:
        layer.set_adapter(active)
    before = Snapshot(model)
    for use in USES:
        results = []
        for each in (la, alone):
            # Some uses draw.
            torch.manual_seed(0)
            results.append(use(each, batches))
        assert_close(*results)
        # Afterwards the user's choice is active again.
        before.assert_equal(model, random_state=False)
        assert all(layer.active_adapters == active for layer in layers)
    model.delete_adapter("other")
    model.set_adapter("default")
    la(batches[0])


# --- states ---------------------------------------------------------------------------


def test_a_state_is_loaded_under_another_precision_of_the_base():
    la = fitted(model=lora_model("bert", torch.float32))
    model = copy.deepcopy(la.model.model)
    embeddings = bert_of(model).embeddings
    # There, back, and there again.
    embeddings.bfloat16().float().bfloat16()
    other = make(model, **RANK)
    other.load_state_dict(la.state_dict())
    assert torch.equal(other.log_marginal_likelihood(), la.log_marginal_likelihood())
    # And back, onto weights that nothing has rounded.
    make(la.model.model, **RANK).load_state_dict(other.state_dict())
    # More than bfloat16 would have rounded away.
    embeddings.word_embeddings.weight.data.add_(0.1)
    with pytest.raises(ValueError, match="word_embeddings"):
        other.load_state_dict(la.state_dict())


@pytest.mark.parametrize("modules_to_save", [None, ["wte"]])
def test_tied_embeddings_under_another_name_of_the_adapter(
    modules_to_save, eight_texts, tmp_path
):
    model = lora_model("gpt2", modules_to_save=modules_to_save)
    la = make(model, class_token_ids=CLASS_TOKEN_IDS, **RANK)
    la.fit([eight_texts])
    model.save_pretrained(tmp_path)
    la.save_pretrained(tmp_path)
    torch.manual_seed(0)
    base = base_model("gpt2").double()
    other = PeftModel.from_pretrained(base, tmp_path, "served").double()
    loaded = from_pretrained(other, tmp_path)
    assert {block.adapter for block in loaded.blocks} == {"served"}
    assert_close(loaded(eight_texts), la(eight_texts), rtol=1e-6, atol=1e-9)
    other.get_input_embeddings().weight.data[0] += 0.1
    with pytest.raises(RuntimeError, match=r"(wte|lm_head).*weight differs"):
        loaded(eight_texts)
