"""Logits of a language model's answers, wherever the padding is."""

import re
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
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
from tests.support.posteriors import make
from tests.support.texts import encoder_decoder

EXACT = {"rtol": 1e-9, "atol": 1e-9}
IN_FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}
assert_exact = partial(assert_close, **EXACT)

Batch = dict[str, Tensor]

# Of the padding.
sides = pytest.mark.parametrize("side", ["left", "right"])


# --- models ---------------------------------------------------------------------------


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
    """Make a language model of a family, in the dtype that it is exact in."""
    if kind == "llama":
        # Its attention is not for float64: the softmax of a masked row is NaN there.
        return llama().eval()
    return lora_model(kind).eval()


@pytest.fixture
def of_answers(gpt2: nn.Module) -> LogitsModel:
    """GPT-2, whose classes are single tokens."""
    return LogitsModel(gpt2, CLASS_TOKEN_IDS)


def of_vocabulary(model: nn.Module) -> LogitsModel:
    """Make every token of the vocabulary a class."""
    return LogitsModel(model, list(range(VOCABULARY)))


def alone(model: nn.Module, batch: Mapping, **more: Any) -> Tensor:
    """Compute each row alone, without padding, at all positions."""
    logits = []
    for row in range(len(batch["input_ids"])):
        inputs = unpadded(batch, row) | more
        logits.append(logits_of(model, inputs))
    return torch.stack(logits)


# --- where a text's answer is ---------------------------------------------------------


@pytest.mark.parametrize("padded_to", [7, 12])
@sides
@pytest.mark.parametrize(
    ("kind", "tolerance"), [("gpt2", EXACT), ("gpt_neox", EXACT), ("llama", IN_FLOAT32)]
)
def test_logits_are_those_after_the_last_real_token_of_the_unpadded_sequence(
    kind, tolerance, side, padded_to
):
    model = causal_model(kind)
    (batch,) = ragged_batches(batch_size=8, padding_side=side, padded_to=padded_to)
    of_answers = LogitsModel(model, CLASS_TOKEN_IDS)
    found = of_answers(batch)
    expected = alone(model, batch)
    assert_close(found, expected, **tolerance)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64, torch.uint8])
@sides
def test_a_mask_may_be_of_any_dtype(of_answers, side, dtype):
    (batch,) = ragged_batches(batch_size=8, padding_side=side)
    expected = of_answers(batch)
    batch["attention_mask"] = batch["attention_mask"].to(dtype)
    found = of_answers(batch)
    assert_exact(found, expected)


@sides
def test_a_wrapper_of_batches_answers_where_it_counts_positions_itself(side):
    # This family counts them from the first real token, without being told.
    model = causal_model("gpt_neox")
    (batch,) = ragged_batches(batch_size=8, padding_side=side)
    wrapper = OfBatches(model)
    of_answers = LogitsModel(wrapper, CLASS_TOKEN_IDS)
    found = of_answers(batch)
    assert_exact(found, alone(model, batch))


@pytest.fixture
def unpadded_ids() -> Tensor:
    """Tokens `(3, 6)` of texts that are all of one length."""
    (batch,) = ragged_batches(lengths=(6, 6, 6), padded_to=6)
    return batch["input_ids"]


def as_keyword(model: nn.Module, ids: Tensor) -> Batch:
    return {"input_ids": ids}


def as_embeddings(model: nn.Module, ids: Tensor) -> Batch:
    embeddings = model.get_input_embeddings()(ids)
    return {"inputs_embeds": embeddings.detach()}


def by_themselves(model: nn.Module, ids: Tensor) -> Tensor:
    return ids


@pytest.mark.parametrize("as_given", [as_keyword, as_embeddings, by_themselves])
def test_without_a_mask_the_last_token_is_at_the_last_position(
    gpt2, of_answers, unpadded_ids, as_given
):
    output = gpt2(input_ids=unpadded_ids)
    expected = output.logits[:, -1, CLASS_TOKEN_IDS]
    found = of_answers(as_given(gpt2, unpadded_ids))
    assert_exact(found, expected)


def test_only_answers_are_computed_and_nothing_is_cached(gpt2, of_answers):
    calls = record_calls(gpt2.base_model.model)
    outputs = []

    def note_output(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output)

    gpt2.register_forward_hook(note_output)
    (batch,) = ragged_batches(lengths=(2, 4), padded_to=4, padding_side="left")
    of_answers(batch)
    call = calls[-1]
    assert call["use_cache"] is False
    output = outputs[-1]
    assert output.past_key_values is None
    assert output.logits.shape == (2, 1, VOCABULARY)


@sides
def test_an_adapter_in_the_output_layer_takes_part(side):
    model = llama_with_output_layer().eval()
    (batch,) = ragged_batches(batch_size=8, padding_side=side)
    of_answers = LogitsModel(model, CLASS_TOKEN_IDS)
    found = of_answers(batch)
    expected = alone(model, batch)
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


# --- logits that are not the text's ---------------------------------------------------


class ImageFirst(nn.Module):
    """A user's wrapper that returns logits of an image's three positions as well."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, batch: Any) -> Tensor:
        tokens = batch["input_ids"] if isinstance(batch, Mapping) else batch
        of_image = torch.zeros(len(tokens), 3, VOCABULARY)
        of_text = self.logits(tokens)
        return torch.cat([of_image, of_text], dim=1)


@pytest.mark.parametrize("as_given", [as_keyword, by_themselves])
def test_logits_at_other_positions_than_the_texts_are_refused(as_given):
    model = LogitsModel(ImageFirst(), CLASS_TOKEN_IDS)
    ids = torch.ones(2, 5, dtype=torch.long)
    batch = as_given(model, ids)
    with pytest.raises(ValueError, match="logits at 8 positions for texts of 5"):
        model(batch)


def test_a_model_of_images_and_texts_answers_texts(eight_texts):
    model = LogitsModel(image_first(), CLASS_TOKEN_IDS)
    logits = model(eight_texts)
    assert logits.isfinite().all()


def test_logits_of_an_image_before_the_text_are_refused(eight_texts):
    model = LogitsModel(image_first(), CLASS_TOKEN_IDS)
    images = torch.randn(8, 3, 8, 8)
    with pytest.raises(ValueError, match="12 positions for texts of 7"):
        model(eight_texts | {"pixel_values": images})
    # Hooks that read the positions are gone.
    for module in model.modules():
        assert not module._forward_pre_hooks


# --- which tokens may be classes ------------------------------------------------------


@pytest.mark.parametrize("ids", [[3, 3], [1], [], [-1, 2]], ids=str)
def test_class_tokens_are_two_or_more_distinct_tokens_of_the_vocabulary(gpt2, ids):
    with pytest.raises(ValueError, match="two or more distinct"):
        LogitsModel(gpt2, ids)


# As they are passed where words, their tokens or something unknown are meant.
@pytest.mark.parametrize(
    "ids", ["AB", [11, None], [[11], ["23"]], [11.0, 23.0], 11], ids=repr
)
def test_what_is_no_number_of_a_token_is_refused_by_what_it_is(gpt2, ids):
    with pytest.raises(ValueError, match=re.escape(f"numbers of tokens, not {ids!r}")):
        LogitsModel(gpt2, ids)


@pytest.mark.parametrize(
    "ids", [torch.tensor([11, 23]), np.array([11, 23]), (11, 23)], ids=repr
)
def test_numbers_of_tokens_may_be_of_any_kind(gpt2, ids):
    la = laplace_lora_ext.Laplace(gpt2, class_token_ids=ids)
    assert la.model.class_token_ids == [11, 23]


def test_tokens_beyond_a_trimmed_output_layer_are_named(trimmed, eight_texts):
    beyond = LogitsModel(trimmed, CLASS_TOKEN_IDS)
    with pytest.raises(ValueError, match=r"42 goes beyond .* only 40"):
        beyond(eight_texts)


def test_the_first_and_the_last_token_may_be_classes(gpt2, eight_texts):
    first_and_last = [0, VOCABULARY - 1]
    of_two = LogitsModel(gpt2, first_and_last)
    found = of_two(eight_texts)
    of_all = of_vocabulary(gpt2)
    expected = of_all(eight_texts)[:, first_and_last]
    assert torch.equal(found, expected)


def test_a_causal_language_model_needs_class_tokens(gpt2, eight_texts):
    la = make(gpt2)
    with pytest.raises(ValueError, match="pass class_token_ids"):
        la.fit([eight_texts])


# --- answers that are warned of -------------------------------------------------------


@pytest.mark.parametrize(
    ("structure", "answers"),
    [
        ("lowrank_kron", CLASS_TOKEN_IDS),
        ("kron", CLASS_TOKEN_IDS),
        # Of several tokens the first ones count.
        ("lowrank_kron", [[token, 5] for token in CLASS_TOKEN_IDS]),
    ],
)
def test_answers_that_the_model_hardly_gives_are_warned_of_once_after_a_fit(
    gpt2, eight_texts, structure, answers
):
    la = make(gpt2, structure, class_token_ids=answers)
    batches = ragged_batches()
    with pytest.warns(UserWarning, match="have only") as caught:
        la.fit(batches)
    messages = [str(warning.message) for warning in caught]
    (message,) = [each for each in messages if "have only" in each]

    of_all = of_vocabulary(gpt2)
    p = of_all(eight_texts).softmax(-1)
    of_answers = p[:, CLASS_TOKEN_IDS].sum(-1)
    mean = of_answers.mean().item()
    # Of 60 tokens, all about equally probable, three have about a twentieth.
    assert mean < 0.06
    percent = f"{100 * mean:.2g} %"
    assert f"have only {percent} of the model's probability together" in message


def test_answers_that_the_model_gives_are_not_warned_of(gpt2):
    # Of 60 tokens, all about equally probable, half have about half of the probability.
    every_second = list(range(0, VOCABULARY, 2))
    la = make(gpt2, class_token_ids=every_second)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*have only")
        la.fit(ragged_batches())


@pytest.fixture
def prompts() -> Batch:
    """Texts of which the first and the second end in answers."""
    (batch,) = ragged_batches(lengths=(4, 6, 7))
    first, second, _ = batch["input_ids"]
    first[3] = CLASS_TOKEN_IDS[0]
    second[5] = CLASS_TOKEN_IDS[1]
    return batch


@pytest.mark.parametrize("longer", [False, True])
def test_prompts_that_all_end_in_their_answers_are_warned_of(gpt2, prompts, longer):
    *_, third = prompts["input_ids"]
    third[6] = CLASS_TOKEN_IDS[1]
    answers = [[token] for token in CLASS_TOKEN_IDS]
    if longer:
        answers = [*answers, [5, 6]]
    with pytest.warns(UserWarning, match="leave the answers out of the prompts"):
        LogitsModel(gpt2, answers)(prompts)
    if longer:
        answers = [[each, 5] for each in CLASS_TOKEN_IDS]
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            LogitsModel(gpt2, answers)(prompts)


def test_some_prompts_may_end_in_answers(of_answers, prompts):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        of_answers(prompts)


# --- encoder-decoders -----------------------------------------------------------------


@pytest.fixture
def bart() -> nn.Module:
    return encoder_decoder("bart")


def test_an_encoder_decoder_answers_after_its_start_token(bart, eight_texts):
    # Its configuration's `decoder_start_token_id`.
    start = torch.tensor([[2]])
    of_answers = LogitsModel(bart, CLASS_TOKEN_IDS)
    found = of_answers(eight_texts)
    expected = alone(bart, eight_texts, decoder_input_ids=start)
    assert_exact(found, expected)


def test_an_encoder_decoder_answers_after_what_the_batch_gives(bart, eight_texts):
    given = torch.tensor([[0, 9, 4]])
    of_batch = eight_texts | {"decoder_input_ids": given.expand(8, -1)}
    of_answers = LogitsModel(bart, CLASS_TOKEN_IDS)
    found = of_answers(of_batch)
    expected = alone(bart, eight_texts, decoder_input_ids=given)
    assert_exact(found, expected)


# --- masked language models -----------------------------------------------------------

MASK = 7


def texts_without_a_mask_token(lengths: Sequence[int], side: str = "right") -> Batch:
    """Make a batch, with another token where there is a mask token by chance."""
    (batch,) = ragged_batches(lengths, batch_size=len(lengths), padding_side=side)
    ids = batch["input_ids"]
    ids[ids == MASK] += 1
    return batch


@sides
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
        text = padded[is_real]
        output = model(input_ids=text[None])
        expected.append(output.logits[0, place, CLASS_TOKEN_IDS])
    of_answers = LogitsModel(model, CLASS_TOKEN_IDS, mask_token_id=MASK)
    found = of_answers(batch)
    assert_exact(found, torch.stack(expected))


@pytest.mark.parametrize("n_masks", [0, 2])
def test_each_text_of_a_masked_language_model_has_one_mask_token(n_masks):
    bert = built("BertForMaskedLM")
    model = LogitsModel(bert, CLASS_TOKEN_IDS, mask_token_id=MASK)
    batch = texts_without_a_mask_token((7, 7))
    first, second = batch["input_ids"]
    first[0] = MASK
    second[:n_masks] = MASK
    message = rf"one mask token 7, but .* have \[1, {n_masks}\]"
    with pytest.raises(ValueError, match=message):
        model(batch)


def test_a_masked_language_model_wants_its_mask_token():
    bert = built("BertForMaskedLM")
    with pytest.raises(ValueError, match=r"BertForMaskedLM.*mask_token_id"):
        LogitsModel(bert, CLASS_TOKEN_IDS)
