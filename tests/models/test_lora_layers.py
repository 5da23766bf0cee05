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
from laplace_lora_ext.models.lora_layers import Block, find_blocks
from tests.support.models import (
    TwoLinear,
    base_model,
    laplace_keywords,
    lora_model,
    pairs,
    ragged_batches,
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


def names(blocks: list[Block]) -> list[str]:
    return [block.name for block in blocks]


# --- found ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "gpt2", "gpt_neox"])
def test_a_and_b_of_every_layer_come_in_the_order_of_the_models_parameters(kind):
    model = lora_model(kind)
    parameters = dict(model.named_parameters())
    blocks = find_blocks(model)
    assert names(blocks) == [name for name in parameters if ".lora_" in name]
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
    torch.manual_seed(0)
    frozen = PeftModel.from_pretrained(base_model(kind).double(), tmp_path)
    frozen.requires_grad_(False)  # older PEFT leaves heads trainable
    keywords = laplace_keywords(kind)
    expected = fitted(model=trained, **keywords)
    found = fitted(model=frozen, **keywords)
    assert names(found.blocks) == names(expected.blocks)
    assert torch.equal(found.H.to_matrix(), expected.H.to_matrix())
    batch = ragged_batches()[0]
    assert torch.equal(found(batch), expected(batch))


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
    config = LoraConfig(r=3, target_modules=["value"], modules_to_save=["classifier"])
    bert.add_adapter("second", config)
    bert.set_adapter(active)
    assert names(find_blocks(bert)) == expected


OF_QUERIES = [name for name in IN_PEFT if "query" in name]
OF_LAYER_1 = [name for name in IN_PEFT if "layer.1." in name]
OF_VALUE_1 = [name for name in OF_LAYER_1 if "value" in name]


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        pytest.param(
            {"target_modules": ["query"]},
            OF_QUERIES,
            id="names",
        ),
        pytest.param(
            {"target_modules": r".*layer\.1\..*"},
            OF_LAYER_1,
            id="a pattern of the whole name",
        ),
        pytest.param(
            {"layers_to_transform": 1},
            OF_LAYER_1,
            id="a layer",
        ),
        pytest.param(
            {"target_modules": ["value"], "layers_to_transform": iter([1])},
            OF_VALUE_1,
            id="names in layers",
        ),
    ],
)
def test_selection_speaks_pefts_words(bert, selection, expected):
    assert names(find_blocks(bert, **selection)) == expected


@pytest.mark.parametrize(
    "selection",
    [{"target_modules": ["key"]}, {"layers_to_transform": [7]}],
    ids=str,
)
def test_a_selection_that_matches_nothing_is_refused_and_says_what_there_is(
    bert, selection
):
    message = r"No LoRA layer matches.*layer\.0\.attention\.self"
    with pytest.raises(ValueError, match=message):
        find_blocks(bert, **selection)


def test_a_weight_takes_part_by_its_name_whether_or_not_it_requires_grad(bert):
    frozen, other = find_blocks(bert)[:2]
    frozen.weight.requires_grad_(False)
    found = find_blocks(bert, weight_names=[frozen.known_as])
    assert names(found) == [frozen.name]
    assert other.weight.requires_grad
    with pytest.raises(ValueError, match=r"none of the weights elsewhere.*layer\.0"):
        find_blocks(bert, weight_names=["elsewhere"])


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
    model = with_lora(TwoLinear(), "first", "second")
    prune.random_unstructured(model.second.lora_B["default"], "weight", 0.5)
    return model


def tied() -> nn.Module:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model = with_lora(layers, "0", "1")
    first, second = model
    second.lora_A["default"].weight = first.lora_A["default"].weight
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
    with pytest.raises((NotImplementedError, ValueError), match=message):
        find_blocks(model)


# --- warned of ------------------------------------------------------------------------


def test_biases_that_stay_fixed_are_listed_once():
    model = lora_model("bert", lora_bias=True)
    with pytest.warns(UserWarning, match="stay at their MAP values") as caught:
        LowRankKronLoRALaplace(model, "classification")
    (ours,) = [warning for warning in caught if "lora_B" in str(warning.message)]
    text = str(ours.message)
    assert text.count("lora_B.default.bias") == 4
    # A head, as PEFT trains it beside every classifier's LoRA.
    assert "modules_to_save" not in text
    assert "lora_A.default.weight" not in text
    assert ours.filename == __file__


def test_an_untrained_adapter_is_warned_of_and_can_be_fitted():
    config = LoraConfig(r=2, target_modules=["first", "second"])
    model = inject_adapter_in_model(config, TwoLinear()).double()
    with pytest.warns(UserWarning, match="looks untrained"):
        la = LowRankKronLoRALaplace(model, "classification")
    ((X, y),) = pairs(n=6)
    la.fit([(X, y)])
    assert torch.isfinite(la(X)).all()


def test_trained_adapters_are_not_warned_of():
    config = LoraConfig(r=2, target_modules=["first", "second"])
    model = inject_adapter_in_model(config, TwoLinear()).double()
    # One matrix that has left 0 is enough.
    nn.init.normal_(model.second.lora_B["default"].weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make(model)
        make(lora_model("gpt2"), **laplace_keywords("gpt2"))
        LowRankKronLoRALaplace(lora_model("bert"), "classification")
