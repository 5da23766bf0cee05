"""Logits of a language model's answers, wherever the padding is."""

import re
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import laplace_lora_ext
from laplace_lora_ext.models.logits_model import LogitsModel
from tests.support.cases import unpadded_rows
from tests.support.dense import logits_of
from tests.support.models import (
    CLASS_TOKEN_IDS,
    VOCABULARY,
    OfBatches,
    built,
    first_batch,
    lora_model,
    ragged_batches,
)
from tests.support.posteriors import make
from tests.support.texts import encoder_decoder

assert_exact = partial(assert_close, rtol=1e-9, atol=1e-9)


# --- models ---------------------------------------------------------------------------


@pytest.fixture
def of_answers(gpt2: nn.Module) -> LogitsModel:
    """GPT-2, whose classes are single tokens."""
    return LogitsModel(gpt2, CLASS_TOKEN_IDS)


def alone(model: nn.Module, batch: Mapping, **more: Any) -> Tensor:
    """Compute each row alone, without padding, at all positions."""
    texts = [{"input_ids": row["input_ids"]} | more for row in unpadded_rows(batch)]
    return torch.stack([logits_of(model, text) for text in texts])


# --- where a text's answer is ---------------------------------------------------------


# Families of models are in `tests/end_to_end/test_compatibility.py`.
def test_a_mask_may_be_of_any_dtype(of_answers, eight_texts):
    expected = of_answers(eight_texts)
    for dtype in (torch.bool, torch.float64):
        mask = eight_texts["attention_mask"].to(dtype)
        assert_exact(of_answers(eight_texts | {"attention_mask": mask}), expected)


def test_a_wrapper_of_batches_answers_where_it_counts_positions_itself():
    # This family counts them from the first real token, without being told.
    model = lora_model("gpt_neox").eval()
    (batch,) = ragged_batches(batch_size=8, padding_side="left")
    found = LogitsModel(OfBatches(model), CLASS_TOKEN_IDS)(batch)
    assert_exact(found, alone(model, batch))


def test_without_a_mask_the_last_token_is_at_the_last_position(gpt2, of_answers):
    (batch,) = ragged_batches(lengths=(6, 6, 6), padded_to=6)
    ids = batch["input_ids"]
    expected = gpt2(input_ids=ids).logits[:, -1, CLASS_TOKEN_IDS]
    embedded = gpt2.get_input_embeddings()(ids).detach()
    outputs = []
    gpt2.register_forward_hook(lambda module, args, output: outputs.append(output))
    for given in (ids, {"input_ids": ids}, {"inputs_embeds": embedded}):
        assert_exact(of_answers(given), expected)
        # Only answers are computed, and nothing is cached.
        assert outputs[-1].logits.shape == (3, 1, VOCABULARY)
        assert outputs[-1].past_key_values is None


def test_an_answer_has_no_place_in_a_decoders_text_without_a_token():
    (batch,) = ragged_batches(lengths=(3, 2, 1))
    empty = torch.tensor([[1, 1], [1, 0], [0, 0]])
    of_decoder = {"decoder_input_ids": batch["input_ids"][:, :2]}
    model = LogitsModel(encoder_decoder("t5"), CLASS_TOKEN_IDS)
    with pytest.raises(ValueError, match="Row 2 has no text"):
        model(batch | of_decoder | {"decoder_attention_mask": empty})


# --- logits that are not the text's ---------------------------------------------------


class ImageFirst(nn.Module):
    """A user's wrapper that returns logits of an image's three positions as well."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(nn.functional.pad(tokens, (3, 0)))


def test_logits_at_other_positions_than_the_texts_are_refused():
    model = LogitsModel(ImageFirst(), CLASS_TOKEN_IDS)
    with pytest.raises(ValueError, match="8 positions for texts of 5"):
        model(torch.ones(2, 5, dtype=torch.long))


# --- which tokens may be classes ------------------------------------------------------


# No two or more distinct tokens of the vocabulary, or lists of them; and words, their
# tokens or something unknown in place of these.
NO_ANSWERS = [[3, 3], [1], [], [-1, 2], [[1, 2], []]]
NO_ANSWERS += ["AB", [11, None], [[11], ["23"]], [11.0, 23.0], 11]


def test_what_is_no_answers_is_refused(gpt2):
    for ids in NO_ANSWERS:
        with pytest.raises(ValueError, match=re.escape(f"not {ids!r}")):
            laplace_lora_ext.Laplace(gpt2, class_token_ids=ids)


def test_numbers_of_tokens_may_be_of_any_kind(gpt2):
    for ids in (torch.tensor([11, 23]), np.array([11, 23]), (11, 23)):
        la = laplace_lora_ext.Laplace(gpt2, class_token_ids=ids)
        assert la.model.class_token_ids == [11, 23]


# --- answers that are warned of -------------------------------------------------------


# Of several tokens the first ones count.
@pytest.mark.parametrize(
    "answers", [CLASS_TOKEN_IDS, [[token, 5] for token in CLASS_TOKEN_IDS]]
)
def test_answers_that_the_model_hardly_gives_are_warned_of_once_after_a_fit(
    gpt2, answers
):
    la = make(gpt2, class_token_ids=answers)
    with pytest.warns(UserWarning, match="have only") as caught:
        la.fit(ragged_batches())
    messages = [str(warning.message) for warning in caught]
    (message,) = [each for each in messages if "have only" in each]
    # As its first batch shows.
    p = LogitsModel(gpt2, list(range(VOCABULARY)))(first_batch()).softmax(-1)
    mean = p[:, CLASS_TOKEN_IDS].sum(-1).mean()
    assert f"have only {100 * mean:.2g} % of" in message
    # Of 60 tokens, all about equally probable, half have about half of the probability.
    every_second = make(gpt2, class_token_ids=list(range(0, VOCABULARY, 2)))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*have only")
        every_second.fit(ragged_batches())


# --- encoder-decoders -----------------------------------------------------------------


def test_an_encoder_decoder_answers_after_what_the_batch_gives(eight_texts):
    bart = encoder_decoder("bart")
    given = torch.tensor([[0, 9, 4]])
    expected = alone(bart, eight_texts, decoder_input_ids=given)
    embedded = bart.get_input_embeddings()(given).detach()
    for key, value in {"input_ids": given, "inputs_embeds": embedded}.items():
        batch = eight_texts | {f"decoder_{key}": value.repeat_interleave(8, 0)}
        assert_exact(LogitsModel(bart, CLASS_TOKEN_IDS)(batch), expected)


# --- masked language models -----------------------------------------------------------

MASK = 7


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_masked_language_model_answers_at_its_mask_token(side):
    model = built("BertForMaskedLM").double()
    (batch,) = ragged_batches((7, 4, 5, 3), batch_size=4, padding_side=side)
    ids = batch["input_ids"]
    # Another token where there is a mask token by chance.
    ids[ids == MASK] += 1
    of_answers = LogitsModel(model, CLASS_TOKEN_IDS, mask_token_id=MASK)
    of_answers = of_answers.for_module(model)  # as a student's is made
    with pytest.raises(ValueError, match="one mask token 7"):
        of_answers(batch)
    expected = []
    # First, last and other tokens of the texts are masked.
    for row, place in enumerate((5, 1, 0, 2)):
        is_real = batch["attention_mask"][row].bool()
        ids[row, is_real.int().argmax() + place] = MASK
        output = model(input_ids=ids[row][is_real][None])
        expected.append(output.logits[0, place, CLASS_TOKEN_IDS])
    assert_exact(of_answers(batch), torch.stack(expected))
    # Twice in one text.
    ids[:, 3] = MASK
    with pytest.raises(ValueError, match="one mask token 7"):
        of_answers(batch)
    with pytest.raises(ValueError, match="mask_token_id"):
        LogitsModel(model, CLASS_TOKEN_IDS)
