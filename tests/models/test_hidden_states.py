"""The layer that makes the logits, found by what it returns."""

import pytest
import torch
from torch import nn

from laplace_lora_ext.models.logits_model import LogitsModel, logits_and_hidden_states
from tests.support.models import (
    CLASS_TOKEN_IDS,
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


CLASSIFIERS = {
    "BERT": (lambda: built("BertForSequenceClassification"), "classifier"),
    "RoBERTa": (lambda: built("RobertaForSequenceClassification"), "classifier.out_proj"),
    "head beside the adapter": (lambda: lora_model("bert").eval(), "modules_to_save.default"),
    "Llama": (lambda: built("LlamaForSequenceClassification"), "score"),
    "GPT-NeoX": (lambda: built("GPTNeoXForSequenceClassification"), "score"),
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
            torch.testing.assert_close(logits, model(batch))
            torch.testing.assert_close(head(plain, layer)(hidden), logits)


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
            torch.testing.assert_close(logits, model(batch))
            of_all = head(plain, layer)(hidden)
            torch.testing.assert_close(of_all[:, CLASS_TOKEN_IDS], logits)


def test_without_such_a_layer_there_are_no_hidden_states():
    plain = TwoLinear()
    plain.register_forward_hook(lambda *called: called[-1] / 2)
    model = LogitsModel(plain)
    logits, hidden = logits_and_hidden_states(model, torch.randn(4, 5))
    assert logits.shape == (4, 3)
    assert hidden is None
