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
    modules = model.named_modules()
    (layer,) = [
        m for name, m in modules if name.endswith(ending) and "orig" not in name
    ]
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


MASK = 1
answering = partial(LogitsModel, class_token_ids=CLASS_TOKEN_IDS, mask_token_id=None)
# A model of logits, and the name of the layer that makes them.
MODELS = {
    "BERT": (lambda: LogitsModel(built("BertForSequenceClassification")), "classifier"),
    "RoBERTa": (
        lambda: LogitsModel(built("RobertaForSequenceClassification")),
        "classifier.out_proj",
    ),
    "head beside the adapter": (
        lambda: LogitsModel(lora_model("bert").eval()),
        "modules_to_save.default",
    ),
    "Llama": (lambda: LogitsModel(built("LlamaForSequenceClassification")), "score"),
    "Mixtral": (lambda: LogitsModel(mixtral()), "score"),
    "answers of GPT-2": (lambda: answering(lora_model("gpt2").eval()), "lm_head"),
    "LoRA there": (lambda: answering(llama_with_output_layer().eval()), "lm_head"),
    "T5": (lambda: answering(encoder_decoder("t5")), "lm_head"),
    "masked": (
        lambda: answering(built("BertForMaskedLM"), mask_token_id=MASK),
        "decoder",
    ),
}


@pytest.mark.parametrize("padding_side", ["right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_the_output_layer_makes_the_logits_of_what_it_read(name, padding_side):
    make_model, output_layer = MODELS[name]
    model = make_model()
    layer = layer_named(model.model, output_layer)
    # The shortest text has two tokens, of which this is the last, or the first.
    place = -2 if padding_side == "left" else 1
    for batch in ragged_batches(padding_side=padding_side):
        # Each text of a masked language model has one mask token.
        ids = batch["input_ids"]
        ids[ids == MASK] = 3
        ids[:, place] = MASK
        # As passes of a posterior run.
        with model.prepared():
            logits, hidden = logits_and_hidden_states(model, batch)
            assert_close(logits, model(batch))
            found = layer(hidden)
            if model.has_answers:
                found = found[:, CLASS_TOKEN_IDS]
            assert_close(found, logits)


# --- language models ------------------------------------------------------------------

MASK = 1


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
    plain = TwoLinear()
    # What the last layer returns is then not the logits.
    plain.register_forward_hook(lambda module, args, output: output / 2)
    _, hidden = logits_and_hidden_states(LogitsModel(plain), torch.randn(4, 5))
    assert hidden is None
