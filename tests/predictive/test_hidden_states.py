"""The layer that makes the logits, found by what it returns."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.predictive.amortization import logits_and_hidden_states
from laplace_lora_ext.tasks.token_labels import TokenLabelsModel
from tests.support.choices import ANSWERS
from tests.support.models import (
    CLASS_TOKEN_IDS,
    TwoLinear,
    built,
    llama_with_output_layer,
    lora_model,
    ragged_batches,
)
from tests.support.texts import encoder_decoder

MASK = 1
answering = partial(LogitsModel, class_token_ids=CLASS_TOKEN_IDS, mask_token_id=None)
# A model of logits, and the name of the layer that makes them.
MODELS = {
    "RoBERTa": (
        lambda: LogitsModel(built("RobertaForSequenceClassification")),
        "classifier.out_proj",
    ),
    "head beside the adapter": (
        lambda: LogitsModel(lora_model("bert").eval()),
        "modules_to_save.default",
    ),
    # Its routers have a matrix for a weight, and return a tuple.
    "Mixtral": (
        lambda: LogitsModel(
            built("MixtralForSequenceClassification", num_key_value_heads=2)
        ),
        "score",
    ),
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
    # Not PEFT's own copy of a head.
    (layer,) = [
        module
        for name, module in model.model.named_modules()
        if name.endswith(output_layer) and "orig" not in name
    ]
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
            if model.answers:
                found = found[:, CLASS_TOKEN_IDS]
            assert_close(found, logits)


def test_answers_of_several_tokens_are_read_at_their_first(eight_texts):
    gpt2 = lora_model("gpt2").eval()
    found = []
    for answers in (CLASS_TOKEN_IDS, ANSWERS):
        model = answering(gpt2, class_token_ids=answers)
        with model.prepared():
            found.append(logits_and_hidden_states(model, eight_texts)[1])
    assert_close(*found)


# --- layers that are none -------------------------------------------------------------


class Routed(TwoLinear):
    """A layer with a matrix returns something else than rows behind the logits."""

    def __init__(self, routed: Any) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.router.forward = lambda input: routed

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        logits = self.second(hidden)
        self.router(hidden)
        return logits


# The last has the logits' shape, and is none of them.
@pytest.mark.parametrize(
    "routed", [(torch.zeros(4, 3), None), torch.zeros(()), torch.zeros(4, 3)]
)
def test_what_is_no_tensor_of_rows_is_passed_over(routed):
    plain = Routed(routed)
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


class Pooling(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).mean(1)


def test_without_such_a_layer_there_are_no_hidden_states(eight_texts):
    plain = TwoLinear()
    # What the last layer returns is then not the logits.
    plain.register_forward_hook(lambda module, args, output: output / 2)
    _, hidden = logits_and_hidden_states(LogitsModel(plain), torch.randn(4, 5))
    assert hidden is None
    # Nor are those of tokens.
    labels_tokens = built("BertForTokenClassification")
    labels_tokens.register_forward_hook(lambda module, args, output: output.logits / 2)
    del eight_texts["labels"]
    _, hidden = logits_and_hidden_states(TokenLabelsModel(labels_tokens), eight_texts)
    assert hidden is None
    # Here one row of logits is of several rows.
    _, hidden = logits_and_hidden_states(
        LogitsModel(Pooling(5, 3)), torch.ones(4, 2, 5)
    )
    assert hidden is None
