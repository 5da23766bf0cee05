"""The layer that makes the logits, found by what it returns."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import MixtralConfig, MixtralForSequenceClassification

from laplace_lora_ext.models.hidden_states import logits_and_hidden_states
from laplace_lora_ext.models.logits_model import LogitsModel
from tests.support.models import (
    CLASS_TOKEN_IDS,
    N_CLASSES,
    VOCABULARY,
    TwoLinear,
    built,
    llama_with_output_layer,
    lora_model,
    ragged_batches,
)
from tests.support.texts import encoder_decoder


def layer_named(model: nn.Module, ending: str) -> nn.Module:
    """Find the one layer whose name ends so, but for PEFT's own copy of a head."""
    layers = []
    for name, module in model.named_modules():
        if name.endswith(ending) and "original" not in name:
            layers.append(module)
    (layer,) = layers
    return layer


def mixtral() -> nn.Module:
    """Make a model whose routers have a matrix for a weight, and return a tuple."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=16,
        num_local_experts=3,
        num_labels=N_CLASSES,
        pad_token_id=0,
    )
    return MixtralForSequenceClassification(config).eval()


def head_beside_an_adapter() -> nn.Module:
    return lora_model("bert").eval()


# --- classifiers ----------------------------------------------------------------------


@pytest.mark.parametrize("padding_side", ["right", "left"])
@pytest.mark.parametrize(
    ("make_model", "output_layer"),
    [
        pytest.param(
            partial(built, "BertForSequenceClassification"), "classifier", id="BERT"
        ),
        pytest.param(
            partial(built, "RobertaForSequenceClassification"),
            "classifier.out_proj",
            id="RoBERTa",
        ),
        pytest.param(
            head_beside_an_adapter,
            "modules_to_save.default",
            id="head beside the adapter",
        ),
        pytest.param(
            partial(built, "LlamaForSequenceClassification"), "score", id="Llama"
        ),
        pytest.param(
            partial(built, "GPTNeoXForSequenceClassification"), "score", id="GPT-NeoX"
        ),
        pytest.param(mixtral, "score", id="Mixtral"),
    ],
)
def test_the_output_layer_makes_the_logits_of_what_it_read(
    make_model, output_layer, padding_side
):
    plain = make_model()
    model = LogitsModel(plain)
    for batch in ragged_batches(padding_side=padding_side):
        # As passes of a posterior run.
        with model.prepared():
            logits, hidden = logits_and_hidden_states(model, batch)
            assert_close(logits, model(batch))
            layer = layer_named(plain, output_layer)
            assert_close(layer(hidden), logits)


# --- language models ------------------------------------------------------------------

MASK = 1


def gpt2() -> LogitsModel:
    return LogitsModel(lora_model("gpt2").eval(), CLASS_TOKEN_IDS)


def llama_with_lora_there() -> LogitsModel:
    return LogitsModel(llama_with_output_layer().eval(), CLASS_TOKEN_IDS)


def t5() -> LogitsModel:
    return LogitsModel(encoder_decoder("t5"), CLASS_TOKEN_IDS)


def masked_bert() -> LogitsModel:
    return LogitsModel(built("BertForMaskedLM"), CLASS_TOKEN_IDS, mask_token_id=MASK)


@pytest.mark.parametrize("padding_side", ["right", "left"])
@pytest.mark.parametrize(
    ("make_model", "output_layer"),
    [
        pytest.param(gpt2, "lm_head", id="GPT-2"),
        pytest.param(llama_with_lora_there, "lm_head", id="Llama with LoRA there"),
        pytest.param(t5, "lm_head", id="T5"),
        pytest.param(masked_bert, "decoder", id="BERT"),
    ],
)
def test_a_language_models_is_read_where_it_answers(
    make_model, output_layer, padding_side
):
    model = make_model()
    # The shortest text has two tokens, of which this is the last, or the first.
    place = -2 if padding_side == "left" else 1
    for batch in ragged_batches(padding_side=padding_side):
        ids = batch["input_ids"]
        # Each text of a masked language model has one mask token.
        ids[ids == MASK] = 3
        ids[:, place] = MASK
        with model.prepared():
            logits, hidden = logits_and_hidden_states(model, batch)
            assert_close(logits, model(batch))
            layer = layer_named(model.model, output_layer)
            of_vocabulary = layer(hidden)
            assert_close(of_vocabulary[:, CLASS_TOKEN_IDS], logits)


# --- layers that are none -------------------------------------------------------------


class Router(nn.Module):
    """A layer with a matrix that returns more than a tensor, or nothing."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 6))
        self.output = output

    def forward(self, hidden: Tensor) -> Any:
        return self.output


class ByKeyword(TwoLinear):
    """Its layers are called with keywords alone, and a router between them."""

    def __init__(self, routed: Any) -> None:
        super().__init__()
        self.router = Router(routed)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(input=x).tanh()
        logits = self.second(input=hidden)
        self.router(hidden=hidden)
        return logits


@pytest.mark.parametrize(
    "routed",
    [
        pytest.param((torch.zeros(4, 3), None), id="tuple"),
        pytest.param({}, id="mapping"),
        pytest.param(None, id="none"),
        pytest.param(torch.zeros(()), id="number"),
    ],
)
def test_keywords_are_read_and_what_is_no_tensor_of_rows_is_passed_over(routed):
    plain = ByKeyword(routed)
    X = torch.randn(4, 5)
    logits, hidden = logits_and_hidden_states(LogitsModel(plain), X)
    assert torch.equal(hidden, plain.first(X).tanh())
    assert torch.equal(logits, plain.second(hidden))


def test_calls_of_other_threads_are_passed_over():
    plain = TwoLinear()
    X = torch.randn(4, 5)
    expected = plain.first(X).tanh()
    others = ThreadPoolExecutor(1)

    def call_by_another(layer: nn.Module, *_: Any) -> None:
        handle.remove()
        # More calls than are kept.
        list(others.map(layer, [torch.zeros(4, 6)] * 20))

    handle = plain.register_forward_hook(lambda *_: call_by_another(plain.second))
    _, hidden = logits_and_hidden_states(LogitsModel(plain), X)
    assert torch.equal(hidden, expected)


def test_without_such_a_layer_there_are_no_hidden_states():
    # What the last layer returns is then not the logits.
    def halve(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output / 2

    plain = TwoLinear()
    plain.register_forward_hook(halve)
    model = LogitsModel(plain)
    logits, hidden = logits_and_hidden_states(model, torch.randn(4, 5))
    assert logits.shape == (4, 3)
    assert hidden is None
