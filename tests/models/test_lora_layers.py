"""Which LoRA weights are found, selected and refused."""

import warnings

import pytest
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn

from laplace_lora_ext import LowRankKronLoRALaplace
from laplace_lora_ext.models.lora_layers import (
    Block,
    find_blocks,
    is_untrained,
    looks_trained,
)
from tests.support.models import (
    CLASS_TOKEN_IDS,
    TwoLinear,
    base_model,
    lora_model,
    pairs,
    with_lora,
)
from tests.support.posteriors import make


def names(blocks: list[Block]) -> list[str]:
    return [block.name for block in blocks]


def in_peft(*parts: str) -> list[str]:
    """List the blocks of `lora_model("bert")` whose names have all these parts."""
    layers = "base_model.model.bert.encoder.layer"
    of_all = [
        f"{layers}.{layer}.attention.self.{module}.lora_{part}.default.weight"
        for layer in (0, 1)
        for module in ("query", "value")
        for part in "AB"
    ]
    return [name for name in of_all if all(part in name for part in parts)]


# --- found ----------------------------------------------------------------------------


def test_a_and_b_keep_their_roles_at_a_rank_above_a_layers_size():
    # Files rely on it.
    blocks = find_blocks(with_lora(TwoLinear(), "first", "second", r=8))
    assert [block.small_output for block in blocks] == [True, False] * 2


def test_only_the_active_adapter_takes_part(bert):
    assert names(find_blocks(nn.DataParallel(bert))) == in_peft()
    # Of another rank than the first one's.
    config = LoraConfig(r=3, target_modules=["value"], modules_to_save=["classifier"])
    bert.add_adapter("second", config)
    assert names(find_blocks(bert)) == in_peft()
    bert.set_adapter("second")
    of_second = [name.replace("default", "second") for name in in_peft("value")]
    assert names(find_blocks(bert)) == of_second
    # One without a head beside one that has one.
    model = get_peft_model(
        TwoLinear(), LoraConfig(target_modules=["first"], modules_to_save=["second"])
    )
    model.add_adapter("headless", LoraConfig(target_modules=["first"]))
    model.set_adapter("headless")
    blocks = find_blocks(model)
    again = find_blocks(model, weight_names=[block.known_as for block in blocks])
    assert names(again) == names(blocks)


def test_selection_speaks_pefts_words(bert):
    for selection, parts in (
        ({"target_modules": ["query"]}, ["query"]),
        # A pattern of the whole name.
        ({"target_modules": r".*layer\.1\..*"}, ["layer.1."]),
        ({"layers_to_transform": 1}, ["layer.1."]),
        (
            {"target_modules": ["value"], "layers_to_transform": iter([1])},
            ["layer.1.", "value"],
        ),
    ):
        assert names(find_blocks(bert, **selection)) == in_peft(*parts)


# --- selected -------------------------------------------------------------------------


def test_a_selection_that_matches_nothing_is_refused_and_says_what_there_is(bert):
    for selection in (
        {"target_modules": ".*key"},
        {"layers_to_transform": 7},
        # The output layer is in no layer with a number.
        {"target_modules": ["classifier"], "layers_to_transform": [1]},
    ):
        message = r"No LoRA layer matches.*layer\.0\.attention\.self"
        with pytest.raises(ValueError, match=message):
            find_blocks(bert, **selection)


def test_a_weight_takes_part_by_its_name_whether_or_not_it_requires_grad(bert):
    frozen, other, *_ = find_blocks(bert)
    frozen.weight.requires_grad_(False)
    for given in (frozen.known_as, [frozen.known_as]):
        assert names(find_blocks(bert, weight_names=given)) == [frozen.name]
    assert other.weight.requires_grad
    # Each name must be there, and no selection is passed over.
    for options, message in (
        ({"weight_names": [frozen.known_as, "nowhere"]}, "none of the weights nowhere"),
        ({"modules_to_save": ["classifier", "elsewhere"]}, "elsewhere"),
        ({"weight_names": frozen.known_as, "target_modules": ["query"]}, "leave out"),
        ({"weight_names": frozen.known_as, "layers_to_transform": 0}, "leave out"),
        ({"weight_names": frozen.known_as, "modules_to_save": True}, "leave out"),
    ):
        with pytest.raises(ValueError, match=message):
            find_blocks(bert, **options)


def test_tokens_of_tied_embeddings_take_part_once():
    model = lora_model("gpt2", trainable_token_indices=[1, 3])
    tied = [m for m in model.modules() if getattr(m, "tied_adapter", None)]
    assert tied
    blocks = [b for b in find_blocks(model) if "trainable_tokens" in b.name]
    assert [block.shape for block in blocks] == [(2, 12)]


# --- refused --------------------------------------------------------------------------


def without_active() -> nn.Module:
    model = lora_model("bert")
    # Each layer has two blocks, A and B.
    for block in find_blocks(model)[::2]:
        block.owner.delete_adapter("default")
    return model


@pytest.mark.parametrize(
    ("make_model", "message"),
    [(without_active, "must be active, and not none"), (TwoLinear, "found no adapter")],
)
def test_what_can_not_take_part_is_refused_by_name(make_model, message):
    model = make_model()
    with pytest.raises(ValueError, match=message):
        find_blocks(model)


# --- warned of ------------------------------------------------------------------------


def test_an_untrained_adapter_is_warned_of_and_can_be_fitted():
    config = LoraConfig(r=2, target_modules=["first", "second"])
    model = inject_adapter_in_model(config, TwoLinear()).double()
    with pytest.warns(UserWarning, match="looks untrained"):
        la = LowRankKronLoRALaplace(model, "classification")
    ((X, y),) = pairs(n=6)
    la.fit([(X, y)])
    assert la(X).isfinite().all()
    config = LoraConfig(target_modules=["word_embeddings"])  # whose A starts at 0
    assert is_untrained(find_blocks(get_peft_model(base_model("bert"), config)))
    # One matrix that has left 0 is enough.
    nn.init.normal_(model.second.lora_B["default"].weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make(model)
        make(lora_model("gpt2"), class_token_ids=CLASS_TOKEN_IDS)
        LowRankKronLoRALaplace(lora_model("bert"), "classification")


@pytest.mark.parametrize("start", [True, "gaussian", "eva", "pissa_niter_2", False])
def test_only_an_adapter_that_starts_at_zero_can_look_trained(start):
    config = LoraConfig(r=2, target_modules=["query"], init_lora_weights=start)
    model = get_peft_model(base_model("bert"), config)
    blocks = find_blocks(model)
    assert not looks_trained(model, blocks)
    nn.init.normal_(blocks[1].weight)
    assert looks_trained(model, blocks) == (start in (True, "gaussian", "eva"))
