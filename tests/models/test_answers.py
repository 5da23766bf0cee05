"""Logits of a language model's answers, wherever the padding is."""

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import GitConfig, GitForCausalLM

import laplace_lora_ext
from laplace_lora_ext.models.logits_model import LogitsModel
from tests.support.dense import logits_of, unpadded
from tests.support.models import (
    CLASS_TOKEN_IDS,
    VOCABULARY,
    OfBatches,
    built,
    llama,
    llama_with_output_layer,
    lora_model,
    ragged_batches,
    record_calls,
)
from tests.support.posteriors import STRUCTURES, make
from tests.support.texts import encoder_decoder

EXACT = {"rtol": 1e-9, "atol": 1e-9}
IN_FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}


def image_first() -> nn.Module:
    """Make a tiny GIT, which reads an image's five positions before a text."""
    torch.manual_seed(0)
    vision = {
        "image_size": 8,
        "patch_size": 4,
        "hidden_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 12,
    }
    config = GitConfig(
        vision_config=vision,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        hidden_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    return GitForCausalLM(config).eval()


def causal_model(kind: str) -> nn.Module:
    if kind == "llama":
        # Its attention is not for float64: the softmax of a masked row is NaN there.
        return llama().eval()
    return lora_model(kind).eval()


def alone(
    model: nn.Module,
    batch: Mapping,
    **more: Any,
) -> torch.Tensor:
    """Compute each row alone, without padding, at all positions."""
    logits = []
    for row in range(len(batch["input_ids"])):
        inputs = unpadded(batch, row) | more
        logits.append(logits_of(model, inputs))
    return torch.stack(logits)


@pytest.mark.parametrize("padded_to", [7, 12])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama"])
def test_logits_are_those_after_the_last_real_token_of_the_unpadded_sequence(
    kind, side, padded_to
):
    model = causal_model(kind)
    (batch,) = ragged_batches(batch_size=8, padding_side=side, padded_to=padded_to)
    expected = alone(model, batch)
    tolerance = IN_FLOAT32 if kind == "llama" else EXACT
    of_answers = LogitsModel(model, CLASS_TOKEN_IDS)
    for dtype in (torch.long, torch.bool, torch.float64, torch.uint8):
        mask = batch["attention_mask"].to(dtype)
        found = of_answers(batch | {"attention_mask": mask})
        assert_close(found, expected, **tolerance)
    if kind == "gpt_neox":  # which counts positions from the first real token by itself
        of_wrapper = LogitsModel(OfBatches(model), CLASS_TOKEN_IDS)
        assert_close(of_wrapper(batch), expected, **tolerance)


def test_without_a_mask_the_last_token_is_the_last_position_of_tokens_or_embeddings():
    model = causal_model("gpt2")
    (batch,) = ragged_batches(lengths=(6, 6, 6), padded_to=6)
    ids = batch["input_ids"]
    embeddings = model.get_input_embeddings()(ids).detach()
    of_last_token = model(input_ids=ids).logits[:, -1]
    expected = of_last_token[:, CLASS_TOKEN_IDS]
    of_answers = LogitsModel(model, CLASS_TOKEN_IDS)
    for unmasked in ({"input_ids": ids}, {"inputs_embeds": embeddings}, ids):
        assert_close(of_answers(unmasked), expected, **EXACT)
    la = make(lora_model("gpt2"), class_token_ids=CLASS_TOKEN_IDS)
    la.fit([(ids, torch.tensor([0, 1, 2]))])
    assert torch.isfinite(la.log_marginal_likelihood())


def test_only_answers_are_computed_and_nothing_is_cached():
    model = causal_model("gpt2")
    calls = record_calls(model.base_model.model)
    outputs = []

    def note_output(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output)

    model.register_forward_hook(note_output)
    (batch,) = ragged_batches(lengths=(2, 4), padded_to=4, padding_side="left")
    LogitsModel(model, CLASS_TOKEN_IDS)(batch)
    assert calls[-1]["use_cache"] is False
    assert outputs[-1].past_key_values is None
    assert outputs[-1].logits.shape == (2, 1, VOCABULARY)


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_adapter_in_the_output_layer_takes_part(side):
    model = llama_with_output_layer().eval()
    (batch,) = ragged_batches(batch_size=8, padding_side=side)
    found = LogitsModel(model, CLASS_TOKEN_IDS)(batch)
    assert_close(found, alone(model, batch), rtol=1e-4, atol=1e-5)
    la = make(model, class_token_ids=CLASS_TOKEN_IDS)
    la.fit([batch])
    assert any("lm_head" in block.name for block in la.blocks)
    assert torch.isfinite(la(batch)).all()


class ImageFirst(nn.Module):
    """A user's wrapper that returns logits of an image's three positions as well."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, batch: Any) -> torch.Tensor:
        tokens = batch["input_ids"] if isinstance(batch, Mapping) else batch
        of_image = torch.zeros(len(tokens), 3, VOCABULARY)
        return torch.cat([of_image, self.logits(tokens)], dim=1)


def test_logits_at_other_positions_than_the_texts_are_refused():
    model = LogitsModel(ImageFirst(), CLASS_TOKEN_IDS)
    ids = torch.ones(2, 5, dtype=torch.long)
    for batch in ({"input_ids": ids}, ids):
        with pytest.raises(ValueError, match="logits at 8 positions for texts of 5"):
            model(batch)


def test_logits_of_an_image_before_the_text_are_refused():
    model = LogitsModel(image_first(), CLASS_TOKEN_IDS)
    (batch,) = ragged_batches(batch_size=8)
    assert torch.isfinite(model(batch)).all()
    images = torch.randn(8, 3, 8, 8)
    with pytest.raises(ValueError, match=r"logits at 12 positions for texts of 7"):
        model(batch | {"pixel_values": images})
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    "ids",
    [
        [3, 3],
        [1, 2, 1],
        [1],
        [],
        [1, VOCABULARY],
        [-1, 2],
    ],
    ids=str,
)
def test_class_tokens_are_two_or_more_distinct_tokens_of_the_vocabulary(ids):
    message = "two or more distinct tokens of the model's vocabulary"
    with pytest.raises(ValueError, match=message):
        LogitsModel(lora_model("gpt2"), ids)


@pytest.mark.parametrize(
    "ids",
    [
        ["A", "B"],
        "AB",
        [11, None],
        [None, None],
        [[11], ["23"]],
        [11.0, 23.0],
        11,
        ["11", "23"],
    ],
    ids=repr,
)
def test_what_is_no_number_of_a_token_is_refused_by_what_it_is(ids):
    named = re.escape(f"must be numbers of tokens, not {ids!r}")
    for build in (LogitsModel, laplace_lora_ext.Laplace):
        with pytest.raises(ValueError, match=f"{named}.*convert_tokens_to_ids"):
            build(lora_model("gpt2"), class_token_ids=ids)


@pytest.mark.parametrize(
    "ids",
    [torch.tensor([11, 23]), np.array([11, 23]), (11, 23)],
    ids=repr,
)
def test_numbers_of_tokens_may_be_of_any_kind(ids):
    la = laplace_lora_ext.Laplace(lora_model("gpt2"), class_token_ids=ids)
    assert la.model.class_token_ids == [11, 23]


def test_tokens_beyond_a_trimmed_output_layer_are_named():
    model = llama().eval()
    batch, *_ = ragged_batches()
    kept = model.lm_head.weight.data[:40].clone()
    model.lm_head = nn.Linear(16, 40, bias=False)
    model.lm_head.weight.data.copy_(kept)
    for each in (model, OfBatches(model)):
        beyond = LogitsModel(each, CLASS_TOKEN_IDS)
        message = r"\[11, 23, 42\] go beyond .* only 40 tokens"
        with pytest.raises(ValueError, match=message):
            beyond(batch)
        up_to_the_last = LogitsModel(each, [11, 39])
        up_to_the_last(batch)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("batch_size", [3, 8])
def test_answers_that_the_model_hardly_gives_are_warned_of_once_after_a_fit(
    structure, batch_size
):
    model = lora_model("gpt2").eval()
    batches = ragged_batches(batch_size=batch_size)
    la = make(model, structure, class_token_ids=CLASS_TOKEN_IDS)
    with pytest.warns(UserWarning, match="have only") as caught:
        la.fit(batches)
    messages = [str(warning.message) for warning in caught]
    (message,) = [each for each in messages if "have only" in each]

    of_vocabulary = LogitsModel(model, list(range(VOCABULARY)))
    p = torch.cat([of_vocabulary(batch).softmax(-1) for batch in batches])
    mean = p[:, CLASS_TOKEN_IDS].sum(-1).mean().item()
    assert mean < 0.06
    percent = f"{100 * mean:.2g} %"
    assert f"have only {percent} of the model's probability together" in message


def test_answers_that_the_model_gives_are_not_warned_of():
    # Of 60 tokens, all about equally probable, half have about half of the probability.
    every_second = list(range(0, VOCABULARY, 2))
    la = make(lora_model("gpt2"), class_token_ids=every_second)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*have only")
        la.fit(ragged_batches())


def test_a_causal_language_model_needs_class_tokens_which_may_be_first_and_last():
    model = lora_model("gpt2").eval()
    batch, *_ = ragged_batches()
    with pytest.raises(ValueError, match="pass class_token_ids"):
        make(model).fit([batch])
    of_vocabulary = LogitsModel(model, list(range(VOCABULARY)))
    first_and_last = [0, VOCABULARY - 1]
    of_ends = LogitsModel(model, first_and_last)
    assert torch.equal(of_ends(batch), of_vocabulary(batch)[:, first_and_last])


def test_prompts_that_end_in_their_answers_are_warned_of():
    model = LogitsModel(causal_model("gpt2"), CLASS_TOKEN_IDS)
    (batch,) = ragged_batches(lengths=(4, 6, 7))
    first, second, third = batch["input_ids"]
    first[3] = CLASS_TOKEN_IDS[0]
    second[5] = CLASS_TOKEN_IDS[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(batch)
    third[6] = CLASS_TOKEN_IDS[1]
    with pytest.warns(UserWarning, match="leave the answers out of the prompts"):
        model(batch)


# --- encoder-decoders -----------------------------------------------------------------


def test_an_encoder_decoder_answers_after_its_start_token():
    model = encoder_decoder("bart")
    (batch,) = ragged_batches(batch_size=8)
    start = torch.tensor([[2]])
    found = LogitsModel(model, CLASS_TOKEN_IDS)(batch)
    expected = alone(model, batch, decoder_input_ids=start)
    assert_close(found, expected, **EXACT)


def test_an_encoder_decoder_answers_after_what_the_batch_gives():
    model = encoder_decoder("bart")
    (batch,) = ragged_batches(batch_size=8)
    given = torch.tensor([[0, 9, 4]])
    of_batch = batch | {"decoder_input_ids": given.expand(8, -1)}
    found = LogitsModel(model, CLASS_TOKEN_IDS)(of_batch)
    expected = alone(model, batch, decoder_input_ids=given)
    assert_close(found, expected, **EXACT)


# --- masked language models -----------------------------------------------------------

MASK = 7


def texts_without_a_mask_token(
    lengths: Sequence[int],
    side: str = "right",
) -> dict[str, Any]:
    (batch,) = ragged_batches(lengths, batch_size=len(lengths), padding_side=side)
    ids = batch["input_ids"]
    ids[ids == MASK] += 1
    return batch


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_masked_language_model_answers_at_its_mask_token(side):
    model = built("BertForMaskedLM").double()
    batch = texts_without_a_mask_token((7, 4, 5, 3), side)
    expected = []
    # First, last and other tokens of the texts are masked.
    for row, place in enumerate((5, 1, 0, 2)):
        is_real = batch["attention_mask"][row].bool()
        padded = batch["input_ids"][row]
        start = is_real.int().argmax()
        padded[start + place] = MASK
        output = model(input_ids=padded[is_real][None])
        expected.append(output.logits[0, place, CLASS_TOKEN_IDS])
    found = LogitsModel(model, CLASS_TOKEN_IDS, mask_token_id=MASK)(batch)
    assert_close(found, torch.stack(expected), **EXACT)


@pytest.mark.parametrize("n_masks", [0, 2])
def test_each_text_of_a_masked_language_model_has_one_mask_token(n_masks):
    model = LogitsModel(built("BertForMaskedLM"), CLASS_TOKEN_IDS, mask_token_id=MASK)
    batch = texts_without_a_mask_token((7, 7))
    first, second = batch["input_ids"]
    first[0] = MASK
    second[:n_masks] = MASK
    message = rf"one mask token 7, but .* have \[1, {n_masks}\]"
    with pytest.raises(ValueError, match=message):
        model(batch)


def test_a_masked_language_model_wants_its_mask_token():
    with pytest.raises(ValueError, match=r"BertForMaskedLM.*mask_token_id"):
        LogitsModel(built("BertForMaskedLM"), CLASS_TOKEN_IDS)
