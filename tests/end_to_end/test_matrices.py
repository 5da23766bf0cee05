"""Weights of any kind: further adapters, costs, heads, which take part, refusals."""

import warnings
from collections import OrderedDict
from functools import partial

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.testing import assert_close

import laplace_lora_ext
from laplace_lora_ext.models.adapters import add_fresh_adapter, own_weights
from laplace_lora_ext.models.lora_layers import find_blocks
from tests.compatibility.kinds import with_dora
from tests.support.cases import Case, dense
from tests.support.dense import EXACT, curvature_of, full_rank, labels_of, predicted
from tests.support.matrices import (
    of_activated,
    of_b_alone,
    of_convolutions,
    of_embedding,
    of_experts,
    of_tokens,
    plain,
    roberta,
)
from tests.support.models import (
    TwoLinear,
    base_model,
    built,
    head_of,
    pairs,
    plain_model,
)
from tests.support.posteriors import count_forward_passes, make, normal
from tests.support.texts import encoder_decoder

assert_exact = partial(assert_close, **EXACT)
# Most of these models are warned of, since their examples take passes of their own.
pytestmark = pytest.mark.filterwarnings("ignore")


# --- no rows --------------------------------------------------------------------------


def test_each_example_takes_a_pass_of_its_own_which_is_said_once():
    case = of_embedding()
    la = make(case.model)
    passes = count_forward_passes(la)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        la.fit(case.batches)
        la.fit(case.batches)
    # A batch is looked at as a whole before its examples are, one at a time; the last
    # one has a single example.
    n_of_a_fit = 2 + len(labels_of(case.batches))
    assert len(passes) == 2 * n_of_a_fit
    messages = [str(warning.message) for warning in caught]
    # Of two fits, one.
    (message,) = [message for message in messages if "no linear layer" in message]
    assert "2 of 6 matrices, such as base_model" in message
    # Of three classes, two contrasts.
    assert "a forward pass and 2 backward passes of its own" in message

    # Linear layers alone run in batches.
    la = make(case.model, target_modules=["query"])
    passes = count_forward_passes(la)
    la.fit(case.batches)
    assert len(passes) == len(case.batches)


# --- further adapters, and one whose A is frozen --------------------------------------


@pytest.mark.parametrize("build", [of_experts, of_embedding, of_tokens, of_activated])
def test_a_second_adapter_has_matrices_of_its_own(build):
    case = build()
    texts = case.all_inputs()
    first = case.fitted()
    of_first = predicted(first, texts)
    add_fresh_adapter(case.model, "second")
    drawn = own_weights(case.model, "second")
    for place, weight in enumerate(drawn.values()):
        # A seed for each weight, so that none is drawn alike.
        weight.data.copy_(0.3 * normal(*weight.shape, seed=place))
    second = case.fitted()

    # The same weights as the only adapter of a model.
    other = build()
    for name, weight in own_weights(other.model, "default").items():
        weight.data.copy_(drawn[name])
    alone = other.fitted()
    assert_close(curvature_of(second), curvature_of(alone))
    assert_close(predicted(second, texts), predicted(alone, texts))
    # The first posterior still predicts by its own adapter.
    assert_close(predicted(first, texts), of_first)


def test_a_posterior_over_b_alone_is_loaded_where_no_weight_is_trainable(
    batch, tmp_path
):
    case = of_b_alone()
    la = case.fitted()
    la.save_pretrained(tmp_path)
    case.model.save_pretrained(tmp_path)
    torch.manual_seed(0)  # the base model of `lora_model`
    model = PeftModel.from_pretrained(base_model("bert").double(), tmp_path)
    again = laplace_lora_ext.from_pretrained(model, tmp_path)
    assert [block.name for block in again.blocks] == [block.name for block in la.blocks]
    assert_close(again(batch), la(batch))


# --- KFAC's own factors ---------------------------------------------------------------


def test_doras_identity_is_no_input_of_expand():
    la = make(with_dora(), **full_rank(kfac_approx="expand"))
    la.fit(pairs(n=5))
    # DoRA sends an identity through A and B too, which is no input of theirs.
    for block in la.H_facs:
        assert block.normalizer == 5
    # The first A reads the examples as they are.
    ((X, _),) = pairs(n=5)
    assert_close(la.H_facs[0].trace, X.square().sum())


def test_doras_identity_keeps_no_batch_from_going_whole():
    la = make(with_dora(), **full_rank())
    # Its rows are five, which four examples don't divide.
    batches = [*pairs(n=5), *pairs(n=4)]
    la.fit([(X[[i]], y[[i]]) for X, y in batches for i in range(len(y))])
    expected = la.H.to_matrix()
    la.fit(batches)
    assert_exact(la.H.to_matrix(), expected)
    calls = count_forward_passes(la)
    la.fit(batches)
    assert len(calls) == len(batches)


def test_expand_is_refused_where_a_decoder_reads_answers_of_several_tokens():
    writer = encoder_decoder("t5")
    with pytest.raises(NotImplementedError, match="a decoder reads"):
        make(writer, class_token_ids=[[3, 4], [5]], **full_rank(kfac_approx="expand"))
    make(writer, class_token_ids=[3, 5], **full_rank(kfac_approx="expand"))


def test_what_holds_no_matrix_is_named():
    if not hasattr(peft, "MontecloraConfig"):
        pytest.skip("this PEFT has no MonteCLoRA")
    model = plain_model(monteclora_config=peft.MontecloraConfig())
    with pytest.raises(NotImplementedError, match=r"first has a \w+ among its weights"):
        make(model)


@pytest.mark.parametrize(
    ("structure", "settings"),
    [("lowrank_kron", full_rank(kfac_approx="expand")), ("kron", {})],
)
def test_statistics_of_rows_are_refused_where_there_are_none(structure, settings):
    model = of_embedding().model
    with pytest.raises(NotImplementedError, match="lora_embedding_A"):
        make(model, structure, **settings)
    make(model, structure, target_modules=["query"], **settings)


def test_kron_is_refused_for_dora():
    with pytest.raises(NotImplementedError, match=r"DoRA.*first\.lora_A"):
        make(with_dora(), "kron")


# --- heads ----------------------------------------------------------------------------


def test_the_smaller_factor_is_dense_and_the_larger_one_has_the_rank():
    # The head's last layer has more outputs than inputs.
    la = make(plain(9), modules_to_save=True, backend_kwargs={"rank": 3})
    la.fit(pairs())
    for block, factors in zip(la.blocks, la.H.blocks, strict=True):
        smaller, larger = sorted(block.shape)
        assert factors.Q.shape == (smaller, smaller)
        # No more than the factor has.
        assert factors.U.shape == (larger, min(3, larger))


# --- which take part ------------------------------------------------------------------


def names(case: Case, **selection) -> list[str]:
    """Name the blocks without what they have in common."""
    blocks = find_blocks(case.model, **selection)
    return [block.known_as.removeprefix("base_model.model.") for block in blocks]


def test_names_of_an_embedding_and_of_tokens():
    embeddings = "bert.embeddings.word_embeddings"
    selection = {"target_modules": ["word_embeddings"]}
    assert names(of_embedding(), **selection) == [
        f"{embeddings}.lora_embedding_A",
        f"{embeddings}.lora_embedding_B",
    ]
    (tokens,) = names(of_tokens(), **selection)
    assert tokens.startswith(embeddings)
    assert tokens.endswith("trainable_tokens_delta")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("experts", {"gate_up_proj", "down_proj"}),
        ("gate_up_proj", {"gate_up_proj"}),
        ("experts.gate_up_proj", {"gate_up_proj"}),
    ],
)
def test_experts_are_selected_by_their_module_or_their_parameter(name, parameters):
    found = names(of_experts(), target_modules=[name])
    # A name ends with the parameter, the matrix, and the expert's weight.
    assert {each.split(".")[-3] for each in found} == parameters
    # In two layers, A and B of three experts.
    assert len(set(found)) == len(found) == 2 * 2 * 3 * len(parameters)
    assert "model.layers.0.mlp.experts.gate_up_proj.lora_A.weight[2]" in found


def test_magnitudes_take_part_where_asked_for():
    case = of_convolutions(use_dora=True)
    wanted = [block.known_as for block in find_blocks(case.model)]
    assert not any("magnitude" in name for name in wanted)
    for layer in ("first", "second", "last"):
        wanted.append(f"base_model.model.{layer}.lora_magnitude_vector.weight")
    # No name of a weight has a hyphen: none is left out.
    with_magnitudes = Case(case.model, case.batches, but="-")
    la = with_magnitudes.fitted(weight_names=wanted)
    expected = dense(with_magnitudes)
    assert_exact(curvature_of(la), expected.curvature("lowrank_kron"))


def heads_of(la) -> list[str]:
    """Name the head's weights and biases."""
    return [block.name for block in la.blocks if block.kind == "head"]


WHOLE = "base_model.model.classifier.modules_to_save.default"
# Both layers have a bias, which takes part wherever its weight does.
DENSE = [f"{WHOLE}.dense.weight", f"{WHOLE}.dense.bias"]
OUT_PROJ = [f"{WHOLE}.out_proj.weight", f"{WHOLE}.out_proj.bias"]


def test_names_select_heads():
    model = roberta()
    # LoRA alone is the default.
    assert heads_of(make(model)) == []
    for selection, expected in (
        ("classifier", DENSE + OUT_PROJ),
        # In the order of the model, whatever that of the names.
        (["out_proj", "dense"], DENSE + OUT_PROJ),
    ):
        assert heads_of(make(model, modules_to_save=selection)) == expected


def test_what_is_frozen_in_a_head_is_left_out_unless_all_is():
    model = roberta()
    head_of(model).dense.requires_grad_(False)
    assert heads_of(make(model, modules_to_save=True)) == OUT_PROJ
    # As in an adapter that was loaded for inference.
    model.requires_grad_(False)
    assert heads_of(make(model, modules_to_save=True)) == DENSE + OUT_PROJ


def with_norm() -> nn.Module:
    """Make a model whose head is not of linear layers alone."""
    head = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3))
    layers = {"encoder": nn.Linear(5, 6), "head": head}
    config = LoraConfig(target_modules=["encoder"], modules_to_save=["head"])
    return get_peft_model(nn.Sequential(OrderedDict(layers)), config)


def headless() -> nn.Module:
    return get_peft_model(TwoLinear(), LoraConfig(target_modules=["first"]))


def tied() -> nn.Module:
    """Make a model in which another layer has the weight of the head's last one."""
    model = plain()
    spare = nn.Linear(4, 3)
    spare.weight = head_of(model)[-1].weight
    model.base_model.model.spare = spare
    return model


@pytest.mark.parametrize(
    ("model", "selection", "message"),
    [
        (plain, ["score"], r"head\.0, .*head\.2, .*head\.4\."),
        # The beginning of a name.
        (plain, ["hea"], "no modules_to_save hea"),
        (headless, True, "no modules_to_save at all"),
        (headless, ["head"], "none"),
        (with_norm, True, r"head\.0\.weight is a weight of LayerNorm"),
        (tied, True, r"Layers share weights: .*head\S*\.4\.weight"),
    ],
)
def test_heads_that_can_not_take_part_are_refused_by_name(model, selection, message):
    refused = (NotImplementedError, ValueError)
    with pytest.raises(refused, match=message):
        make(model(), modules_to_save=selection)


def test_adapters_that_peft_ties_as_views_are_refused():
    model = built("LlamaForCausalLM", tie_word_embeddings=True)
    targets = ["embed_tokens", "lm_head"]
    tied = get_peft_model(
        model, LoraConfig(target_modules=targets, ensure_weight_tying=True)
    )
    with pytest.raises(NotImplementedError, match=r"share weights: .*lm_head\.lora_B"):
        make(tied, class_token_ids=[1, 2])


def test_the_linear_layer_of_a_head_takes_part_by_its_name():
    # Its weight and its bias.
    assert len(heads_of(make(with_norm(), modules_to_save=["head.1"]))) == 2
