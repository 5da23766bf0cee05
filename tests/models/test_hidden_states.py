"""The layer that makes the logits, found by what it returns."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import MixtralConfig, MixtralForSequenceClassification

from laplace_lora_ext.models.logits_model import LogitsModel, logits_and_hidden_states
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


def head(model: nn.Module, name: str) -> nn.Module:
    (layer,) = (m for n, m in model.named_modules() if n.endswith(name) and "original" not in n)
    return layer


def mixtral() -> nn.Module:
    """Its routers have a matrix for a weight, and return a tuple."""
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


CLASSIFIERS = {
    "BERT": (lambda: built("BertForSequenceClassification"), "classifier"),
    "RoBERTa": (lambda: built("RobertaForSequenceClassification"), "classifier.out_proj"),
    "head beside the adapter": (lambda: lora_model("bert").eval(), "modules_to_save.default"),
    "Llama": (lambda: built("LlamaForSequenceClassification"), "score"),
    "GPT-NeoX": (lambda: built("GPTNeoXForSequenceClassification"), "score"),
    "Mixtral": (mixtral, "score"),
}


@pytest.mark.parametrize("padding_side", ["right", "left"])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_output_layer_makes_the_logits_of_what_it_read(name, padding_side):
    make, layer = CLASSIFIERS[name]
    plain = make()
    model = LogitsModel(plain)
    for batch in ragged_batches(padding_side=padding_side):
        with model.prepared():
            logits, hidden = logits_and_hidden_states(model, batch)
            assert_close(logits, model(batch))
            assert_close(head(plain, layer)(hidden), logits)


ANSWERING = {
    "GPT-2": (lambda: lora_model("gpt2").eval(), "lm_head", {}),
    "Llama with LoRA there": (lambda: llama_with_output_layer().eval(), "lm_head", {}),
    "T5": (lambda: encoder_decoder("t5"), "lm_head", {}),
    "BERT": (lambda: built("BertForMaskedLM"), "decoder", {"mask_token_id": 1}),
}


@pytest.mark.parametrize("padding_side", ["right", "left"])
@pytest.mark.parametrize("name", ANSWERING)
def test_a_language_models_is_read_where_it_answers(name, padding_side):
    make, layer, options = ANSWERING[name]
    plain = make()
    model = LogitsModel(plain, CLASS_TOKEN_IDS, **options)
    for batch in ragged_batches(padding_side=padding_side):
        batch["input_ids"][batch["input_ids"] == 1] = 3
        batch["input_ids"][:, -2 if padding_side == "left" else 1] = 1
        with model.prepared():
            logits, hidden = logits_and_hidden_states(model, batch)
            assert_close(logits, model(batch))
            of_all = head(plain, layer)(hidden)
            assert_close(of_all[:, CLASS_TOKEN_IDS], logits)


class Router(nn.Module):
    """A layer with a matrix for a weight that returns more than a tensor, or nothing of a batch."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 6))
        self.output = output

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.output


class ByKeyword(TwoLinear):
    """Its layers are called with keywords alone, and a router between them."""

    def __init__(self, routed: Any) -> None:
        super().__init__()
        self.router = Router(routed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(input=x).tanh()
        logits = self.second(input=hidden)
        self.router(hidden=hidden)
        return logits


@pytest.mark.parametrize("routed", [(torch.zeros(4, 3), None), {}, None, torch.zeros(())], ids=str)
def test_keywords_are_read_and_what_is_no_tensor_of_rows_is_passed_over(routed):
    plain = ByKeyword(routed)
    X = torch.randn(4, 5)
    logits, hidden = logits_and_hidden_states(LogitsModel(plain), X)
    assert torch.equal(hidden, plain.first(X).tanh())
    assert torch.equal(logits, plain.second(hidden))


def test_without_such_a_layer_there_are_no_hidden_states():
    plain = TwoLinear()
    plain.register_forward_hook(lambda *called: called[-1] / 2)
    model = LogitsModel(plain)
    logits, hidden = logits_and_hidden_states(model, torch.randn(4, 5))
    assert logits.shape == (4, 3)
    assert hidden is None
