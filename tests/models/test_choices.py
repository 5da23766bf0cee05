"""Logits of answers of several tokens, wherever the padding is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import AutoTokenizer

import laplace_lora_ext
from laplace_lora_ext.models.collator import DataCollatorForChoices
from laplace_lora_ext.models.hidden_states import logits_and_hidden_states
from laplace_lora_ext.models.logits_model import LogitsModel
from tests.compatibility.families import FAMILIES, RIGHT
from tests.support.choices import (
    ANSWERS,
    batches_of_own_choices,
    choices_batch,
    logits_of_choices,
    of_prompts,
    one_token_choices,
    prompts_of,
    unpadded_choices,
)
from tests.support.models import (
    CLASS_TOKEN_IDS,
    VOCABULARY,
    OfBatches,
    built,
    llama_with_output_layer,
    lora_model,
    ragged_batches,
    record_calls,
)
from tests.support.pages import WORDS, write_adapter
from tests.support.posteriors import make
from tests.support.texts import encoder_decoder

EXACT = {"rtol": 1e-9, "atol": 1e-9}
# Of the families' models, whose attention is not all for float64.
IN_FLOAT32 = {"rtol": 1e-4, "atol": 1e-4}
MOST_TOKENS = 3  # the longest answer's

Batch = dict[str, Tensor]


@pytest.fixture
def four_texts() -> Batch:
    """A batch of texts, padded to the seven tokens of the longest."""
    (batch,) = ragged_batches(batch_size=4, lengths=(7, 4, 5, 3))
    return batch


@pytest.fixture
def with_answers(gpt2: nn.Module) -> LogitsModel:
    """GPT-2, whose classes are `ANSWERS`."""
    return LogitsModel(gpt2, ANSWERS)


def with_choices(batch: Batch, side: str = "right") -> Batch:
    """Put `ANSWERS` behind each text of a batch."""
    (choices,) = of_prompts([batch], ANSWERS, side)
    return choices


def expected_logits(model: Any, batch: Any, normalised: bool = False) -> Tensor:
    """Score each choice by a pass of its own, `(B, K)`."""
    of_texts = []
    with torch.no_grad():
        for choices in unpadded_choices(batch):
            logits = logits_of_choices(model, choices, normalised)
            of_texts.append(logits)
    return torch.stack(of_texts)


# --- what a logit is ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "side", "normalised"),
    [
        ("gpt2", "left", False),
        ("gpt2", "right", True),
        ("gpt_neox", "left", True),
        ("gpt_neox", "right", False),
    ],
)
def test_logits_are_sums_over_the_tokens_of_each_choice_alone(kind, side, normalised):
    model = lora_model(kind).eval()
    logits_model = LogitsModel(model, normalised=normalised)
    for batch in batches_of_own_choices(side):
        expected = expected_logits(model, batch, normalised)
        assert_close(logits_model(batch), expected, **EXACT)
        counts = batch["score_mask"].float()  # of any dtype
        assert torch.equal(
            logits_model(batch | {"score_mask": counts}), logits_model(batch)
        )


@pytest.mark.parametrize(("side", "normalised"), [("left", True), ("right", False)])
def test_answers_of_all_texts_are_choices_of_each(gpt2, side, normalised):
    of_answers = LogitsModel(gpt2, ANSWERS, normalised=normalised)
    for batch in ragged_batches(padding_side=side):
        choices = with_choices(batch)
        expected = expected_logits(gpt2, choices, normalised)
        assert_close(of_answers(batch), expected, **EXACT)


@pytest.mark.parametrize("normalised", [False, True])
def test_a_batch_without_a_mask_has_no_padding(gpt2, normalised):
    of_answers = LogitsModel(gpt2, ANSWERS, normalised=normalised)
    for batch in ragged_batches():
        # Of one text, as far as all of them go.
        ids = batch["input_ids"][:1, :2]
        choices = choices_batch(ids.tolist(), [ANSWERS])
        expected = expected_logits(gpt2, choices, normalised)
        found = of_answers({"input_ids": ids})
        assert_close(found, expected, **EXACT)


def test_an_adapter_in_the_output_layer_takes_part(eight_texts):
    model = llama_with_output_layer().eval()
    found = LogitsModel(model, ANSWERS)(eight_texts)
    expected = expected_logits(model, with_choices(eight_texts))
    assert_close(found, expected, **IN_FLOAT32)


def test_only_what_counts_is_read(eight_texts):
    model = llama_with_output_layer().eval()
    of_model = model.base_model.model
    calls = record_calls(of_model)
    shapes = []

    def note_shape(module: nn.Module, args: Any, output: Tensor) -> None:
        shapes.append(output.shape)

    of_model.lm_head.register_forward_hook(note_shape)
    LogitsModel(model, ANSWERS)(eight_texts)
    n_rows = 8 * len(ANSWERS)
    assert shapes == [(n_rows, MOST_TOKENS, VOCABULARY)]
    (call,) = calls
    assert call["input_ids"].shape == (n_rows, 7 + MOST_TOKENS)
    assert call["use_cache"] is False


def test_wrappers_of_batches_answer_too(gpt2, with_answers, eight_texts):
    of_wrapper = LogitsModel(OfBatches(gpt2), ANSWERS)
    found = of_wrapper(eight_texts)
    expected = with_answers(eight_texts)
    assert_close(found, expected, **EXACT)


@pytest.mark.parametrize(
    "family",
    ["Llama", "Gemma 3", "OPT", "DeepSeek-V3", "BLOOM", "Mamba", "RoBERTa as decoder"],
)
def test_families_agree_with_each_answer_alone(family, four_texts):
    model = FAMILIES[family].model(RIGHT).eval()
    found = LogitsModel(model, ANSWERS)(four_texts)
    expected = expected_logits(model, with_choices(four_texts))
    assert_close(found, expected.to(found), **IN_FLOAT32)


@pytest.mark.parametrize("key", ["bbox", "position_ids", "token_type_ids"])
def test_other_inputs_of_each_token_are_refused(with_answers, eight_texts, key):
    with pytest.raises(ValueError, match=f"The batch has {key} for each token"):
        with_answers(eight_texts | {key: eight_texts["attention_mask"]})


# --- encoder-decoders -----------------------------------------------------------------


@pytest.fixture(params=["bart", "t5"])
def writer(request: pytest.FixtureRequest) -> nn.Module:
    """An encoder-decoder."""
    return encoder_decoder(request.param)


def written(writer: nn.Module, prompt: list[int], answer: list[int]) -> Tensor:
    """Score an answer that is written after one text."""
    start = writer.config.decoder_start_token_id
    with torch.no_grad():
        output = writer(
            input_ids=torch.tensor([prompt]),
            decoder_input_ids=torch.tensor([[start, *answer]]),
        )
    log_p = output.logits[0].log_softmax(-1)
    # The last place would predict what comes behind the answer.
    places = torch.arange(len(answer))
    return log_p[places, answer].sum()


def test_an_encoder_decoder_writes_its_answers(writer, four_texts):
    expected = []
    for prompt in prompts_of(four_texts):
        of_text = [written(writer, prompt, answer) for answer in ANSWERS]
        expected.append(torch.stack(of_text))
    found = LogitsModel(writer, ANSWERS)(four_texts)
    assert_close(found, torch.stack(expected), **EXACT)


def test_an_encoder_decoder_reads_the_text_of_its_choices_once(writer, four_texts):
    start = writer.config.decoder_start_token_id
    of_decoder = choices_batch(prompts=[[start]] * 4, choices=[ANSWERS] * 4)
    choices = {
        "input_ids": four_texts["input_ids"],
        "attention_mask": four_texts["attention_mask"],
        "decoder_input_ids": of_decoder["input_ids"],
        "score_mask": of_decoder["score_mask"],
    }
    found = LogitsModel(writer)(choices)
    expected = LogitsModel(writer, ANSWERS)(four_texts)
    assert_close(found, expected, **EXACT)


# --- answers of one token -------------------------------------------------------------


@pytest.fixture
def with_class_tokens(gpt2: nn.Module) -> LogitsModel:
    """GPT-2, whose classes are single tokens."""
    return LogitsModel(gpt2, CLASS_TOKEN_IDS)


def test_answers_of_one_token_are_class_tokens(gpt2, with_class_tokens, eight_texts):
    answers = [[token] for token in CLASS_TOKEN_IDS]
    nested = LogitsModel(gpt2, answers)
    assert nested.class_token_ids == CLASS_TOKEN_IDS
    expected = with_class_tokens(eight_texts)
    assert torch.equal(nested(eight_texts), expected)


def test_choices_of_one_token_are_class_tokens(gpt2, with_class_tokens, eight_texts):
    (choices,) = one_token_choices([eight_texts])
    logits = LogitsModel(gpt2)(choices)
    # Logits of choices are log-probabilities, which differ from logits by a constant.
    found = logits.softmax(-1)
    expected = with_class_tokens(eight_texts).softmax(-1)
    assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_variances_of_choices_of_one_token_are_learnt_from_the_same(
    gpt2, with_class_tokens, eight_texts
):
    (choices,) = one_token_choices([eight_texts])
    _, found = logits_and_hidden_states(LogitsModel(gpt2), choices)
    _, expected = logits_and_hidden_states(with_class_tokens, eight_texts)
    assert_close(found, expected, **EXACT)


# --- log-probabilities ----------------------------------------------------------------


def test_log_probabilities_leave_room_for_all_that_begins_otherwise(
    gpt2, with_answers, eight_texts
):
    log_p = with_answers.log_probs(eight_texts)
    *_, log_others = log_p.unbind(-1)

    of_vocabulary = LogitsModel(gpt2, list(range(VOCABULARY)))
    p_of_tokens = of_vocabulary(eight_texts).softmax(-1)
    # All answers begin with one of two tokens.
    beginnings = [11, 23]
    p_of_beginnings = p_of_tokens[:, beginnings].sum(-1)
    expected = 1 - p_of_beginnings
    assert_close(log_others.exp(), expected, **EXACT)


def test_log_probabilities_are_those_of_a_distribution(with_answers, eight_texts):
    log_p = with_answers.log_probs(eight_texts)
    total = log_p.exp().sum(-1)
    assert_close(total, torch.ones(8).double(), **EXACT)
    # Among the answers alone, it is the logits' distribution.
    among_answers = log_p[:, :-1].softmax(-1)
    expected = with_answers(eight_texts).softmax(-1)
    assert_close(among_answers, expected, **EXACT)


# --- what choices have in common ------------------------------------------------------


def with_one_beginning() -> Batch:
    """Make choices that all begin with the same token, behind their prompts."""
    return choices_batch(
        prompts=[[5, 6], [7, 8]], choices=[[[3, 9, 4], [3, 9, 2]], [[3, 1], [3, 2, 5]]]
    )


def with_another_prompt_of_one_choice() -> Batch:
    """Change a prompt for its second choice alone."""
    batch = with_one_beginning()
    batch["input_ids"][:, 1, 0] = 30
    return batch


def with_a_beginning_that_does_not_count() -> Batch:
    """Leave out what is common to all choices, the third token of each row."""
    batch = with_one_beginning()
    batch["score_mask"][..., 2] = 0
    return batch


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(
    "make_batch",
    [
        with_one_beginning,
        with_another_prompt_of_one_choice,
        with_a_beginning_that_does_not_count,
    ],
)
def test_what_choices_have_in_common_counts_as_their_mask_says(
    gpt2, make_batch, normalised
):
    batch = make_batch()
    found = LogitsModel(gpt2, normalised=normalised)(batch)
    assert_close(found, expected_logits(gpt2, batch, normalised), **EXACT)


# --- what is refused ------------------------------------------------------------------


def zero_at(*place: Any, to: int = 0) -> Any:
    """Change what a batch says of one place."""

    def change(batch: Batch) -> None:
        batch["score_mask"][place] = to

    return change


def taking(of_each: Any) -> Any:
    """Take a part of each tensor of a batch."""

    def change(batch: Batch) -> None:
        for key in ("input_ids", "attention_mask", "score_mask"):
            batch[key] = of_each(batch[key])

    return change


def narrow_the_mask(batch: Batch) -> None:
    batch["score_mask"] = batch["score_mask"][..., :-1]


def count_padding(batch: Batch) -> None:
    batch["score_mask"][batch["attention_mask"] == 0] = 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (zero_at(1, 2), "Choice 2 of text 1"),
        (zero_at(0, 1, 0, to=1), "token 0 of choice 1 of text 0"),
        (count_padding, "is padding"),
        (narrow_the_mask, "of one shape"),
        (taking(lambda each: each[:, :1]), "two choices"),
        (taking(lambda each: each[:, 0]), "of one shape"),
    ],
)
def test_masks_that_make_no_sense_are_refused(gpt2, change, message):
    batch, _ = batches_of_own_choices()
    change(batch)
    with pytest.raises(ValueError, match=message):
        make(gpt2).fit([batch])


def test_a_batch_with_choices_needs_no_answers(gpt2):
    choices = batches_of_own_choices()
    la = make(gpt2, class_token_ids=ANSWERS)
    with pytest.raises(ValueError, match="score_mask"):
        la.fit(choices)


def test_a_batch_without_choices_needs_answers(gpt2):
    la = make(gpt2)
    message = r"pass class_token_ids, .*class_texts.*score_mask"
    with pytest.raises(ValueError, match=message):
        la.fit(ragged_batches())


def test_a_classifier_has_no_tokens_to_take_means_over(bert):
    with pytest.raises(ValueError, match="normalised=True takes means"):
        make(bert, normalised=True)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([[1, 2], []], "distinct"),
        ([[1, 2], [1, 2]], "distinct"),
        ([[1, 2]], "distinct"),
        ([[1, 2], [3, -1]], "distinct"),
        ([[1, 2], ["3"]], "numbers of tokens"),
    ],
)
def test_answers_are_distinct_and_of_the_vocabulary(gpt2, answers, message):
    with pytest.raises(ValueError, match=message):
        laplace_lora_ext.Laplace(gpt2, class_token_ids=answers)


def test_tokens_beyond_a_trimmed_output_layer_are_named(trimmed, eight_texts):
    logits_model = LogitsModel(trimmed, [[11, 5], [42]])
    with pytest.raises(ValueError, match=r"42 goes beyond .* only 40"):
        logits_model(eight_texts)


def test_a_masked_language_model_answers_with_one_token():
    with pytest.raises(ValueError, match="answers with one token"):
        LogitsModel(built("BertForMaskedLM"), ANSWERS, mask_token_id=7)


# --- texts ----------------------------------------------------------------------------


@pytest.fixture
def tokenizer(tmp_path):
    write_adapter(tmp_path, "gpt2")
    return AutoTokenizer.from_pretrained(tmp_path)


def of_texts(model: nn.Module, texts: Any, **more: Any):
    """Make a posterior whose answers are given as texts."""
    return laplace_lora_ext.Laplace(model, class_texts=texts, **more)


def test_class_texts_are_tokenized_as_they_stand(gpt2, tokenizer):
    texts = ["which one", "which", "A B C"]
    la = of_texts(gpt2, texts, tokenizer=tokenizer)
    assert la.likelihood == "classification"
    expected = []
    for text in texts:
        # Each word of this vocabulary is a token.
        tokens = [WORDS.index(word) for word in text.split()]
        expected.append(tokens)
    assert la.model.class_token_ids == expected


@pytest.mark.parametrize(
    ("texts", "others"),
    [
        (["A", " "], {}),
        ("AB", {}),
        (["which", "A"], {"tokenizer": None}),
        (["which", "A"], {"class_token_ids": [1, 2]}),
    ],
)
def test_class_texts_are_texts_with_a_tokenizer(gpt2, texts, others, tokenizer):
    with pytest.raises(ValueError, match="tokenizer"):
        of_texts(gpt2, texts, **{"tokenizer": tokenizer} | others)


# --- a collator -----------------------------------------------------------------------

FEATURES = [
    {"prompt": "Question : which one ?", "choices": ["A", "B C"], "labels": 1},
    {"prompt": "which ?", "choices": ["which one", "A B C"], "labels": 0},
]


@pytest.fixture
def collator(tokenizer) -> DataCollatorForChoices:
    return DataCollatorForChoices(tokenizer)


def test_a_collator_makes_batches_of_choices(gpt2, tokenizer, collator):
    batch = collator(FEATURES)
    prompts = []
    choices = []
    for feature in FEATURES:
        of_prompt = tokenizer(feature["prompt"])
        of_choices = tokenizer(feature["choices"])
        prompts.append(of_prompt["input_ids"])
        choices.append(of_choices["input_ids"])
    expected = choices_batch(prompts, choices)
    for key, value in expected.items():
        assert torch.equal(batch[key], value)
    assert batch["labels"].tolist() == [1, 0]
    # A model takes them as they are.
    logits = LogitsModel(gpt2)(batch)
    assert logits.shape == (2, 2)


def test_a_collator_cuts_prompts_at_their_start(tokenizer):
    collator = DataCollatorForChoices(tokenizer, max_length=5)
    batch = collator(FEATURES)
    second_choice = batch["input_ids"][0, 1]
    kept = tokenizer("which one ? B C")
    assert second_choice.tolist() == kept["input_ids"]


def test_a_collator_refuses_a_length_that_leaves_no_prompt(tokenizer):
    # The longest choice has three tokens.
    collator = DataCollatorForChoices(tokenizer, max_length=3)
    with pytest.raises(ValueError, match="raise it"):
        collator(FEATURES)


def test_a_collator_refuses_other_numbers_of_choices(collator):
    of_two, second = FEATURES
    of_three = second | {"choices": ["A", "B", "C"]}
    with pytest.raises(ValueError, match=r"have \[2, 3\] choices"):
        collator([of_two, of_three])
