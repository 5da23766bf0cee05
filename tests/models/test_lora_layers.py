"""Which LoRA weights are found, selected and refused."""

import warnings

import pytest
import torch
from peft import (
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
    inject_adapter_in_model,
)
from torch import nn
from torch.nn.utils import prune

from laplace_lora_ext import LowRankKronLoRALaplace
from laplace_lora_ext.models.lora_layers import Block, find_blocks, looks_trained
from tests.support.models import (
    TwoLinear,
    base_model,
    first_batch,
    laplace_keywords,
    lora_model,
    pairs,
    plain_model,
    with_lora,
)
from tests.support.posteriors import fitted, make

QUERY_AND_VALUE = [
    f"bert.encoder.layer.{layer}.attention.self.{module}.lora_{part}.default.weight"
    for layer in (0, 1)
    for module in ("query", "value")
    for part in "AB"
]
IN_PEFT = ["base_model.model." + name for name in QUERY_AND_VALUE]


# Adapters of a plain module's layers.
BOTH = LoraConfig(r=2, target_modules=["first", "second"])


def names(blocks: list[Block]) -> list[str]:
    return [block.name for block in blocks]


# --- found ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "gpt2", "gpt_neox"])
def test_a_and_b_of_every_layer_come_in_the_order_of_the_models_parameters(kind):
    model = lora_model(kind)
    parameters = dict(model.named_parameters())
    expected = [name for name in parameters if ".lora_" in name]
    blocks = find_blocks(model)
    assert names(blocks) == expected
    for block in blocks:
        assert block.weight is parameters[block.name]
        # A maps to the rank, which is 2.
        assert block.small_output == ("lora_A" in block.name)
        n_outputs = 2 if block.small_output else len(block.weight)
        assert block.shape[0] == n_outputs


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_an_adapter_loaded_for_inference_gives_the_same_posterior(kind, tmp_path):
    trained = lora_model(kind)
    trained.save_pretrained(tmp_path)
    # The base model of `lora_model`.
    torch.manual_seed(0)
    base = base_model(kind).double()
    frozen = PeftModel.from_pretrained(base, tmp_path)
    # Older PEFT leaves heads trainable.
    frozen.requires_grad_(False)
    keywords = laplace_keywords(kind)
    of_trained = fitted(model=trained, **keywords)
    of_frozen = fitted(model=frozen, **keywords)
    assert names(of_frozen.blocks) == names(of_trained.blocks)
    found = of_frozen.H.to_matrix()
    expected = of_trained.H.to_matrix()
    assert torch.equal(found, expected)
    batch = first_batch()
    found = of_frozen(batch)
    assert torch.equal(found, of_trained(batch))


# --- selected -------------------------------------------------------------------------


OF_VALUES = [name for name in IN_PEFT if "value" in name]
OF_SECOND = [name.replace("default", "second") for name in OF_VALUES]


@pytest.mark.parametrize(
    ("active", "expected"),
    [
        pytest.param("default", IN_PEFT, id="default"),
        pytest.param("second", OF_SECOND, id="second"),
    ],
)
def test_only_the_active_adapter_takes_part(bert, active, expected):
    config = LoraConfig(
        # Another rank than the first one's.
        r=3,
        target_modules=["value"],
        modules_to_save=["classifier"],
    )
    bert.add_adapter("second", config)
    bert.set_adapter(active)
    found = find_blocks(bert)
    assert names(found) == expected


OF_QUERIES = [name for name in IN_PEFT if "query" in name]
OF_LAYER_1 = [name for name in IN_PEFT if "layer.1." in name]
OF_VALUE_1 = [name for name in OF_LAYER_1 if "value" in name]


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        pytest.param({"target_modules": ["query"]}, OF_QUERIES, id="names"),
        pytest.param(
            {"target_modules": r".*layer\.1\..*"},
            OF_LAYER_1,
            id="a pattern of the whole name",
        ),
        pytest.param({"layers_to_transform": 1}, OF_LAYER_1, id="a layer"),
        pytest.param(
            {"target_modules": ["value"], "layers_to_transform": iter([1])},
            OF_VALUE_1,
            id="names in layers",
        ),
    ],
)
def test_selection_speaks_pefts_words(bert, selection, expected):
    found = find_blocks(bert, **selection)
    assert names(found) == expected


NO_MATCH = [
    {"target_modules": ["key"]},
    {"target_modules": ["query", "key"]},
    {"target_modules": ".*key"},
    {"layers_to_transform": [7]},
    {"layers_to_transform": [1, 7]},
    {"layers_to_transform": 7},
    {"layers_to_transform": []},
    # The output layer is in no layer with a number.
    {"target_modules": ["value", "classifier"], "layers_to_transform": [1]},
]


def test_a_selection_that_matches_nothing_is_refused_and_says_what_there_is(bert):
    message = r"No LoRA layer matches.*layer\.0\.attention\.self"
    for selection in NO_MATCH:
        with pytest.raises(ValueError, match=message):
            find_blocks(bert, **selection)


def test_where_one_half_of_lora_is_frozen_the_other_takes_part_alone(bert):
    # As LoRA-FA, which does not train A.
    for name, weight in bert.named_parameters():
        if "layer.0." in name and "lora_A" in name:
            weight.requires_grad_(False)
    expected = [n for n in IN_PEFT if "layer.1." in n or "lora_B" in n]
    assert names(find_blocks(bert)) == expected


def test_a_weight_takes_part_by_its_name_whether_or_not_it_requires_grad(bert):
    frozen, other, *_ = find_blocks(bert)
    frozen.weight.requires_grad_(False)
    found = find_blocks(bert, weight_names=[frozen.known_as])
    assert names(found) == [frozen.name]
    assert other.weight.requires_grad
    assert names(find_blocks(bert, weight_names=frozen.known_as)) == [frozen.name]


def test_each_name_of_a_weight_or_a_head_must_be_there(bert):
    first, *_ = find_blocks(bert)
    message = r"none of the weights elsewhere, nowhere; .*layer\.0"
    with pytest.raises(ValueError, match=message):
        find_blocks(bert, weight_names=[first.known_as, "nowhere", "elsewhere"])
    with pytest.raises(ValueError, match="no modules_to_save elsewhere"):
        find_blocks(bert, modules_to_save=["classifier", "elsewhere"])


def test_no_selection_is_passed_over_beside_names_of_weights(bert):
    first, *_ = find_blocks(bert)
    others = {"target_modules": ["query"], "layers_to_transform": 0}
    for name, value in {**others, "modules_to_save": True}.items():
        with pytest.raises(ValueError, match="leave out"):
            find_blocks(bert, weight_names=[first.known_as], **{name: value})


# --- refused --------------------------------------------------------------------------


def disable(model: PeftModel) -> None:
    model.base_model.disable_adapter_layers()


def leave_none_active(model: PeftModel) -> None:
    # Each layer has two blocks, A and B.
    for block in find_blocks(model)[::2]:
        block.owner.delete_adapter("default")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (disable, r"disabled.*enable_adapter"),
        (leave_none_active, "No adapter is active"),
    ],
)
def test_an_adapter_that_does_not_run_alone_is_refused(bert, change, message):
    change(bert)
    with pytest.raises(ValueError, match=message):
        find_blocks(bert)


def prompted() -> nn.Module:
    config = PromptTuningConfig("SEQ_CLS", num_virtual_tokens=2)
    return get_peft_model(base_model("bert"), config)


def pruned() -> nn.Module:
    """Make a weight the product of another one and a mask, as pruning does."""
    model = plain_model()
    B = model.second.lora_B["default"]
    prune.random_unstructured(B, "weight", 0.5)
    return model


def tied() -> nn.Module:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model = with_lora(layers, "0", "1")
    first, second = model
    A = first.lora_A["default"]
    second.lora_A["default"].weight = A.weight
    return model


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (prompted, "PROMPT_TUNING"),
        (TwoLinear, "found no adapter"),
        (pruned, r"must be parameters.*second \(Linear\)\. Leave"),
        (tied, "Layers share weights"),
    ],
)
def test_what_can_not_take_part_is_refused_by_name(make_model, message):
    model = make_model()
    refused = (NotImplementedError, ValueError)
    with pytest.raises(refused, match=message):
        find_blocks(model)


# --- warned of ------------------------------------------------------------------------


def test_biases_that_stay_fixed_are_listed_once():
    model = lora_model("bert", lora_bias=True)
    with pytest.warns(UserWarning, match="stay at their MAP values") as caught:
        LowRankKronLoRALaplace(model, "classification")
    ours = []
    for warning in caught:
        if "lora_B" in str(warning.message):
            ours.append(warning)
    (ours,) = ours
    text = str(ours.message)
    assert text.count("lora_B.default.bias") == 4
    # A head, as PEFT trains it beside every classifier's LoRA.
    assert "modules_to_save" not in text
    assert "lora_A.default.weight" not in text
    # It points to the user's own line.
    assert ours.filename == __file__


def test_an_untrained_adapter_is_warned_of_and_can_be_fitted():
    model = inject_adapter_in_model(BOTH, TwoLinear()).double()
    with pytest.warns(UserWarning, match="looks untrained"):
        la = LowRankKronLoRALaplace(model, "classification")
    batches = pairs(n=6)
    la.fit(batches)
    ((X, _),) = batches
    p = la(X)
    assert p.isfinite().all()


@pytest.mark.parametrize(
    "start", [True, "gaussian", "orthogonal", "olora", "pissa", "pissa_niter_2", False]
)
def test_only_an_adapter_that_starts_at_zero_can_look_trained(start):
    config = LoraConfig(r=2, target_modules=["query"], init_lora_weights=start)
    model = get_peft_model(base_model("bert"), config)
    blocks = find_blocks(model)
    assert not looks_trained(model, blocks)
    nn.init.normal_(blocks[1].weight)
    assert looks_trained(model, blocks) == (start in (True, "gaussian"))


def test_trained_adapters_are_not_warned_of():
    model = inject_adapter_in_model(BOTH, TwoLinear()).double()
    # One matrix that has left 0 is enough.
    B = model.second.lora_B["default"]
    nn.init.normal_(B.weight)
    classifier = lora_model("bert")
    language_model = lora_model("gpt2")
    keywords = laplace_keywords("gpt2")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make(model)
        make(language_model, **keywords)
        LowRankKronLoRALaplace(classifier, "classification")
