"""Logits of answers of several tokens, wherever the padding is."""

from functools import partial
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoTokenizer

import laplace_lora_ext
from laplace_lora_ext.models.choices import DataCollatorForChoices
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.predictive.amortization import logits_and_hidden_states
from tests.support.choices import (
    ANSWERS,
    batches_of_own_choices,
    choices_batch,
    logits_of_choices,
    of_prompts,
    unpadded_choices,
)
from tests.support.models import (
    CLASS_TOKEN_IDS,
    VOCABULARY,
    Batch,
    OfBatches,
    built,
    llama_with_output_layer,
    ragged_batches,
    record_calls,
    without_labels,
)
from tests.support.pages import WORDS, write_adapter
from tests.support.texts import encoder_decoder

EXACT = {"rtol": 1e-9, "atol": 1e-9}
# Of the families' models, whose attention is not all for float64.
IN_FLOAT32 = {"rtol": 1e-4, "atol": 1e-4}
MOST_TOKENS = 3  # the longest answer's


def with_choices(batch: Batch, side: str = "right") -> Batch:
    """Put `ANSWERS` behind each text of a batch."""
    (choices,) = of_prompts([batch], ANSWERS, side)
    return choices


def expected_logits(model: Any, batch: Any, normalised: bool = False) -> Tensor:
    """Score each choice by a pass of its own, `(B, K)`."""
    with torch.no_grad():
        of_texts = [
            logits_of_choices(model, choices, normalised)
            for choices in unpadded_choices(batch)
        ]
    return torch.stack(of_texts)


# --- what a logit is ------------------------------------------------------------------


# The contract suite has sums, and padding on the right.
def test_answers_of_all_texts_are_choices_of_each(gpt2):
    of_answers = LogitsModel(gpt2, ANSWERS, normalised=True)
    for batch in ragged_batches(padding_side="left"):
        expected = expected_logits(gpt2, with_choices(batch), normalised=True)
        assert_close(of_answers(batch), expected, **EXACT)
    # Without a mask there is no padding.
    ids = batch["input_ids"][:, 5:]
    expected = expected_logits(gpt2, choices_batch(ids.tolist(), [ANSWERS] * 2))
    for model in (gpt2, OfBatches(gpt2)):
        assert_close(LogitsModel(model, ANSWERS)({"input_ids": ids}), expected, **EXACT)


def test_answers_have_the_probability_of_their_first_tokens_together(gpt2):
    of_answers = LogitsModel(gpt2, ANSWERS)
    batch = ragged_batches()[0]
    log_p = of_answers.log_probs(batch).detach()
    shares, others = log_p[:, :-1], log_p[:, -1].exp()
    assert_close(shares.log_softmax(-1), of_answers(batch).log_softmax(-1), **EXACT)
    # Three answers begin alike.
    first_tokens = list({answer[0] for answer in ANSWERS})
    last = batch["attention_mask"].sum(1) - 1
    logits = gpt2(batch["input_ids"], batch["attention_mask"]).logits
    at_first = logits[torch.arange(len(last)), last].softmax(-1)
    expected = at_first[:, first_tokens].sum(-1)
    assert_close(shares.exp().sum(-1), expected, **EXACT)
    assert_close(others, 1 - expected, **EXACT)


def test_only_what_counts_is_read(eight_texts):
    model = llama_with_output_layer().eval()
    of_model = model.base_model.model
    calls = record_calls(of_model)
    seen = []

    def note(module: object, args: object, output: Tensor) -> None:
        seen.append((output.shape, of_model.config.use_cache))

    of_model.lm_head.register_forward_hook(note)
    found = LogitsModel(model, ANSWERS)(eight_texts)
    n_rows = 8 * len(ANSWERS)
    # And no keys and values are kept.
    assert seen == [((n_rows, MOST_TOKENS, VOCABULARY), False)]
    assert of_model.config.use_cache
    assert calls[0]["input_ids"].shape == (n_rows, 7 + MOST_TOKENS)
    # An adapter in the output layer takes part.
    expected = expected_logits(model, with_choices(eight_texts))
    assert_close(found, expected, **IN_FLOAT32)


# --- encoder-decoders -----------------------------------------------------------------


def test_an_encoder_decoder_reads_the_text_of_choices_once(eight_texts):
    writer = encoder_decoder("t5")
    # The contract suite proves them.
    of_answers = LogitsModel(writer, ANSWERS)(eight_texts)
    start = writer.config.decoder_start_token_id
    of_decoder = choices_batch(prompts=[[start]] * 8, choices=[ANSWERS] * 8)
    choices = eight_texts | {
        "decoder_input_ids": of_decoder["input_ids"],
        "score_mask": of_decoder["score_mask"],
    }
    assert_close(LogitsModel(writer)(choices), of_answers, **EXACT)


# --- answers of one token -------------------------------------------------------------


def test_answers_and_choices_of_one_token_are_class_tokens(gpt2, eight_texts):
    of_tokens = LogitsModel(gpt2, CLASS_TOKEN_IDS)
    nested = LogitsModel(gpt2, [[token] for token in CLASS_TOKEN_IDS])
    assert nested.class_token_ids == CLASS_TOKEN_IDS
    expected, hidden = logits_and_hidden_states(of_tokens, eight_texts)
    assert torch.equal(nested(eight_texts), expected)
    (choices,) = of_prompts([eight_texts], [[token] for token in CLASS_TOKEN_IDS])
    found, hidden_of_choices = logits_and_hidden_states(
        LogitsModel(gpt2), choices | {"return_dict": True}
    )
    # Logits of choices are log-probabilities, which differ from logits by a constant.
    assert_close(found.softmax(-1), expected.softmax(-1), rtol=1e-10, atol=1e-12)
    # Variances are learnt from the same.
    assert_close(hidden_of_choices, hidden, **EXACT)


# --- what is refused ------------------------------------------------------------------


def test_masks_that_make_no_sense_are_refused(gpt2):
    batch, _ = batches_of_own_choices()
    without_a_choice, first, padding = (batch["score_mask"].clone() for _ in range(3))
    without_a_choice[1, 2] = 0
    first[0, 1, 0] = 1
    padding[batch["attention_mask"] == 0] = 1
    one_choice = {key: value[:, :1] for key, value in batch.items() if value.ndim == 3}
    for changed, message in (
        ({"score_mask": without_a_choice}, "choice 2 of text 1 is 0"),
        ({"score_mask": first}, "choice 1 of text 0"),
        ({"score_mask": padding}, "counts padding"),
        ({"score_mask": padding[..., 1:]}, "of one shape"),
        (one_choice, "two choices"),
    ):
        with pytest.raises(ValueError, match=message):
            LogitsModel(gpt2)(batch | changed)


def test_answers_and_choices_want_each_their_own_batches(batch, gpt2):
    with_answers = LogitsModel(gpt2, ANSWERS)
    choices, _ = batches_of_own_choices()
    with pytest.raises(ValueError, match=r"can't have .*score_mask"):
        with_answers(choices)
    with pytest.raises(ValueError, match=r"can't have \['bbox'\]"):
        with_answers(batch | {"bbox": batch["attention_mask"]})
    with pytest.raises(ValueError, match=r"class_token_ids.*language_modeling"):
        LogitsModel(gpt2)(batch)
    with pytest.raises(ValueError, match="one token"):
        LogitsModel(built("BertForMaskedLM"), ANSWERS, mask_token_id=7)


# --- texts ----------------------------------------------------------------------------


@pytest.fixture
def tokenizer(tmp_path):
    write_adapter(tmp_path, "gpt2")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    # Whole texts begin with a special token.
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="[UNK] $A", special_tokens=[("[UNK]", 1)]
    )
    return tokenizer


def test_class_texts_are_tokenized_as_they_stand(gpt2, tokenizer):
    of_texts = partial(laplace_lora_ext.Laplace, gpt2)
    texts = ["which one", "which", "A B C"]
    la = of_texts(class_texts=texts, tokenizer=tokenizer)
    assert la.likelihood == "classification"
    # Each word of this vocabulary is a token.
    expected = [[WORDS.index(word) for word in text.split()] for text in texts]
    assert la.model.class_token_ids == expected
    for wrong in (["A", " "], "AB"):
        with pytest.raises(ValueError, match="tokenizer"):
            of_texts(class_texts=wrong, tokenizer=tokenizer)
    for options in ({}, {"tokenizer": tokenizer, "class_token_ids": [1, 2]}):
        with pytest.raises(ValueError, match="tokenizer"):
            of_texts(class_texts=texts, **options)


FEATURES = [
    {"prompt": "Question : which one ?", "choices": ["A", "B C"], "labels": 1},
    {"prompt": "which ?", "choices": ["which one", "A B C"], "labels": 0},
]


def test_a_collator_makes_batches_of_choices(gpt2, tokenizer):
    batch = DataCollatorForChoices(tokenizer)(FEATURES)
    prompts = [tokenizer(each["prompt"])["input_ids"] for each in FEATURES]
    plain = partial(tokenizer, add_special_tokens=False)
    choices = [plain(each["choices"])["input_ids"] for each in FEATURES]
    for key, value in choices_batch(prompts, choices).items():
        assert torch.equal(batch[key], value)
    assert batch["labels"].tolist() == [1, 0]
    # A model takes them as they are.
    assert LogitsModel(gpt2)(batch).shape == (2, 2)
    # Prompts are cut at their start, behind what every text begins with.
    unlabelled = list(map(without_labels, FEATURES))
    batch = DataCollatorForChoices(tokenizer, max_length=5)(unlabelled)
    kept = plain("[UNK] one ? B C")["input_ids"]
    assert batch["input_ids"][0, 1].tolist() == kept
    # The longest choice has three tokens, and every text's first one stays.
    with pytest.raises(ValueError, match="raise it"):
        DataCollatorForChoices(tokenizer, max_length=4)(FEATURES)
    with pytest.raises(ValueError, match=r"\[2, 4\] choices"):
        DataCollatorForChoices(tokenizer)(
            [FEATURES[0], FEATURES[1] | {"choices": "ABCD"}]
        )
