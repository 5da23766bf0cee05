"""Which LoRA weights are found, selected and refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    inject_adapter_in_model,
)
from torch import nn

import laplace_lora_ext
from laplace_lora_ext.models.lora_layers import Block, find_blocks
from tests.support.models import (
    TwoLinear,
    base_model,
    laplace_keywords,
    lora_model,
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


def names(blocks: list[Block]) -> list[str]:
    return [block.name for block in blocks]


def peft_names(*, prefix: str = "base_model.model.") -> list[str]:
    return [prefix + name for name in QUERY_AND_VALUE]


def test_plain_lora_gives_a_and_b_of_every_layer_in_order(bert):
    assert names(find_blocks(bert)) == peft_names()


def test_a_block_is_the_weight_of_the_named_layer(bert):
    parameters = dict(bert.named_parameters())
    for block in find_blocks(bert):
        assert block.weight is parameters[block.name]
        assert block.small_output == ("lora_A" in block.name)
        assert block.weight.shape == ((2, 12) if block.small_output else (12, 2))


@pytest.mark.parametrize("kind", ["bert", "gpt2", "gpt_neox"])
def test_blocks_follow_the_order_of_the_models_parameters(kind):
    model = lora_model(kind)
    ids = [id(p) for name, p in model.named_parameters() if ".lora_" in name]
    assert [id(block.weight) for block in find_blocks(model)] == ids


@pytest.mark.parametrize("r", [2, 4])
def test_rslora_gives_the_posterior_of_lora_with_the_same_scaling(r):
    settings = {"r": r, "lora_dropout": 0.0}
    plain = lora_model("bert", lora_alpha=4 * r**0.5, **settings)
    rs = lora_model("bert", lora_alpha=4, use_rslora=True, **settings)
    batches = ragged_batches()
    torch.testing.assert_close(
        fitted(model=plain, batches=batches).log_marginal_likelihood(),
        fitted(model=rs, batches=batches).log_marginal_likelihood(),
        rtol=1e-10,
        atol=0,
    )


def test_rank_pattern_and_alpha_pattern_set_the_rank_of_their_layers():
    model = lora_model("bert", rank_pattern={"query": 3}, alpha_pattern={"value": 1})
    ranks = {b.name.split(".")[-4]: b.weight.shape[0] for b in find_blocks(model)[::2]}
    assert ranks == {"query": 3, "value": 2}
    la = fitted(model=model, batches=ragged_batches())
    assert la.n_params == 2 * (3 + 2) * (12 + 12)
    assert torch.isfinite(la(ragged_batches()[0])).all()


@pytest.mark.parametrize(
    "init", [True, False, "gaussian", "pissa", "pissa_niter_2", "olora", "orthogonal"]
)
def test_every_initialisation_is_found(init):
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=init)
    try:
        model = get_peft_model(base_model("bert"), config)
    except ValueError as error:
        pytest.skip(f"this PEFT: {error}")
    assert names(find_blocks(model)) == peft_names()


def test_conv1d_bases_are_found_with_inputs_and_outputs_the_right_way_round():
    model = lora_model("gpt2")
    shapes = {
        block.name.split(".", 4)[-1].replace(".default.weight", ""): tuple(block.weight.shape)
        for block in find_blocks(model)
        if ".h.0." in block.name
    }
    assert shapes == {
        "0.attn.c_attn.lora_A": (2, 12),
        "0.attn.c_attn.lora_B": (36, 2),
        "0.attn.c_proj.lora_A": (2, 12),
        "0.attn.c_proj.lora_B": (12, 2),
        "0.mlp.c_proj.lora_A": (2, 48),
        "0.mlp.c_proj.lora_B": (12, 2),
    }


def test_lora_injected_into_a_plain_module_is_found_and_fitted():
    torch.manual_seed(0)
    model = with_lora(TwoLinear(), "first", "second").double()
    assert names(find_blocks(model)) == [
        f"{layer}.lora_{part}.default.weight" for layer in ("first", "second") for part in "AB"
    ]
    X, y = torch.randn(8, 5).double(), torch.arange(8) % 3
    la = fitted(model=model, batches=[(X, y)])
    assert la(X).shape == (8, 3)
    assert la.n_params == 2 * (5 + 6) + 2 * (6 + 3)


def test_lora_of_transformers_add_adapter_gives_the_posterior_of_peft(bert):
    torch.manual_seed(0)
    model = base_model("bert").double()
    model.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=["query", "value"]))
    reference = {
        n.removeprefix("base_model.model.").replace("modules_to_save.default.", ""): p
        for n, p in bert.state_dict().items()
        if "original_module" not in n
    }
    model.load_state_dict(reference)
    assert names(find_blocks(model)) == QUERY_AND_VALUE
    assert torch.equal(
        fitted(model=model, batches=ragged_batches()).log_marginal_likelihood(),
        fitted(model=bert, batches=ragged_batches()).log_marginal_likelihood(),
    )


class Around(nn.Module):
    """Holds a model under the name that a wrapper of torch gives it."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.add_module(name, model)


@pytest.mark.parametrize(
    "wrappers",
    [
        ["module"],
        ["_orig_mod"],
        ["_orig_mod", "module"],
        ["module", "_orig_mod"],
        ["module", "module"],
    ],
    ids="-in-".join,
)
def test_prefixes_of_wrappers_are_stripped(bert, wrappers):
    model = bert
    for name in wrappers:
        model = Around(model, name)
    assert names(find_blocks(model)) == peft_names()


def test_prefixes_of_wrappers_are_stripped_within_the_model(bert):
    bert.base_model.model.bert = Around(bert.base_model.model.bert, "_orig_mod")
    assert names(find_blocks(bert)) == peft_names()


def test_two_layers_whose_names_differ_by_a_wrapper_alone_are_both_found():
    model = nn.Module()
    model.layer = with_lora(TwoLinear(), "first")
    model.module = nn.Module()
    model.module.layer = with_lora(TwoLinear(), "first")
    assert len(find_blocks(model)) == 4


def test_data_parallel_gives_the_posterior_of_the_model_within(bert):
    batches = ragged_batches()
    expected = fitted(model=bert, batches=batches).log_marginal_likelihood()
    la = fitted(model=nn.DataParallel(bert), batches=batches)
    assert torch.equal(la.log_marginal_likelihood(), expected)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_an_adapter_loaded_for_inference_gives_the_same_posterior(kind, tmp_path):
    trained = lora_model(kind)
    trained.save_pretrained(tmp_path)
    torch.manual_seed(0)
    frozen = PeftModel.from_pretrained(base_model(kind).double(), tmp_path)
    frozen.requires_grad_(False)  # older PEFT leaves heads trainable
    batches, keywords = ragged_batches(), laplace_keywords(kind)
    expected, actual = (
        fitted(model=model, batches=batches, **keywords) for model in (trained, frozen)
    )
    assert not any(p.requires_grad for p in frozen.parameters())
    assert names(actual.blocks) == names(expected.blocks)
    assert torch.equal(actual.mean, expected.mean)
    assert torch.equal(actual.log_marginal_likelihood(), expected.log_marginal_likelihood())
    assert torch.equal(actual.H.to_matrix(), expected.H.to_matrix())
    assert torch.equal(actual(batches[0]), expected(batches[0]))


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_a_frozen_adapter_gives_the_same_evidence_in_every_structure(structure, bert):
    frozen = copy.deepcopy(bert).requires_grad_(False)
    evidences = []
    for model in (bert, frozen):
        la = make(model, structure)
        la.fit(ragged_batches())
        evidences.append(la.log_marginal_likelihood())
    assert torch.equal(*evidences)


def test_weights_on_the_meta_device_are_refused(bert):
    with pytest.raises(ValueError, match=r"meta.*query\.lora_A"):
        make(bert.to("meta"))


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        yield messages


def of_the_library(caught: list[warnings.WarningMessage]) -> list[str]:
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if "lora_B" in text]


def test_an_adapter_whose_b_is_all_zero_is_warned_of_once(caught):
    laplace_lora_ext.LowRankKronLoRALaplace(
        inject_adapter_in_model(LoraConfig(r=2, target_modules=["first"]), TwoLinear()),
        "classification",
    )
    untrained = [text for text in of_the_library(caught) if "untrained" in text]
    assert len(untrained) == 1


def test_an_adapter_with_one_b_that_is_not_zero_is_not_warned_of(caught):
    model = inject_adapter_in_model(
        LoraConfig(r=2, target_modules=["first", "second"]), TwoLinear()
    )
    nn.init.normal_(model.second.lora_B["default"].weight)
    laplace_lora_ext.LowRankKronLoRALaplace(model, "classification")
    assert not [text for text in of_the_library(caught) if "untrained" in text]


def test_a_fit_of_an_untrained_adapter_is_finite():
    torch.manual_seed(0)
    model = inject_adapter_in_model(LoraConfig(r=2, target_modules=["first"]), TwoLinear())
    with pytest.warns(UserWarning, match="untrained"):
        la = laplace_lora_ext.LowRankKronLoRALaplace(model.double(), "classification")
    X = torch.randn(6, 5).double()
    la.fit([(X, torch.arange(6) % 3)])
    assert torch.isfinite(la.log_marginal_likelihood())
    assert torch.isfinite(la(X)).all()


@pytest.mark.skipif(
    "lora_bias" not in LoraConfig.__dataclass_fields__, reason="this PEFT has no LoRA biases"
)
def test_trainable_heads_and_biases_are_warned_of_once_and_listed(caught):
    laplace_lora_ext.LowRankKronLoRALaplace(lora_model("bert", lora_bias=True), "classification")
    held = [text for text in of_the_library(caught) if "stay at their MAP values" in text]
    assert len(held) == 1
    assert held[0].count("lora_B.default.bias") == 4
    for part in ("weight", "bias"):
        assert f"classifier.modules_to_save.default.{part}" in held[0]
    assert "lora_A.default.weight" not in held[0]


def test_a_model_with_lora_weights_alone_is_not_warned_of(caught):
    laplace_lora_ext.LowRankKronLoRALaplace(
        lora_model("gpt2"), "classification", **laplace_keywords("gpt2")
    )
    assert not of_the_library(caught)


def test_warnings_point_at_the_line_that_made_the_laplace():
    with pytest.warns(UserWarning, match="stay at their MAP values") as caught:
        laplace_lora_ext.LowRankKronLoRALaplace(lora_model("bert"), "classification")
    ours = [warning for warning in caught if "lora_B" in str(warning.message)]
    assert [warning.filename for warning in ours] == [__file__]
