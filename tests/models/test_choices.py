"""Logits of answers of several tokens, wherever the padding is."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import AutoTokenizer

import laplace_lora_ext
from laplace_lora_ext.models.logits_model import LogitsModel, logits_and_hidden_states
from laplace_lora_ext.text.collator import DataCollatorForChoices
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
from tests.support.posteriors import generator, make
from tests.support.texts import encoder_decoder

EXACT = {"rtol": 1e-9, "atol": 1e-9}
# Of the families' models, whose attention is not all for float64.
IN_FLOAT32 = {"rtol": 1e-4, "atol": 1e-4}
# The longest answer's. The last of them is predicted, and never read.
MOST_TOKENS = 3
MOST_READ = MOST_TOKENS - 1

Batch = dict[str, Tensor]


@pytest.fixture
def four_texts() -> Batch:
    """A batch of texts, padded to the seven tokens of the longest."""
    (batch,) = ragged_batches(
        batch_size=4,
        lengths=(7, 4, 5, 3),
    )
    return batch


@pytest.fixture
def with_answers(gpt2: nn.Module) -> LogitsModel:
    """GPT-2, whose classes are `ANSWERS`."""
    return LogitsModel(gpt2, ANSWERS)


def with_choices(
    batch: Batch,
    side: str = "right",
) -> Batch:
    """Put `ANSWERS` behind each text of a batch."""
    (choices,) = of_prompts([batch], ANSWERS, side)
    return choices


def expected_logits(
    model: Any,
    batch: Any,
    normalised: bool = False,
) -> Tensor:
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


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.float32,
        torch.uint8,
    ],
)
def test_what_counts_may_be_of_any_dtype(gpt2, dtype):
    logits_model = LogitsModel(gpt2)
    for batch in batches_of_own_choices():
        counts = batch["score_mask"].to(dtype)
        found = logits_model(batch | {"score_mask": counts})
        assert torch.equal(found, logits_model(batch))


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

    def note_shape(
        module: nn.Module,
        args: Any,
        output: Tensor,
    ) -> None:
        shapes.append(output.shape)

    of_model.lm_head.register_forward_hook(note_shape)
    LogitsModel(model, ANSWERS)(eight_texts)
    n_rows = 8 * len(ANSWERS)
    assert shapes == [(n_rows, MOST_TOKENS, VOCABULARY)]
    (call,) = calls
    assert call["input_ids"].shape == (n_rows, 7 + MOST_READ)
    assert call["use_cache"] is False


def test_wrappers_of_batches_answer_too(gpt2, with_answers, eight_texts):
    of_wrapper = LogitsModel(OfBatches(gpt2), ANSWERS)
    found = of_wrapper(eight_texts)
    expected = with_answers(eight_texts)
    assert_close(found, expected, **EXACT)


@pytest.mark.parametrize(
    "family",
    [
        "Llama",
        "Qwen3",
        "Gemma",
        "Gemma 3",
        "Phi-3",
        "GPT-NeoX",
        "GPT-J",
        "OPT",
        "Falcon",
        "DeepSeek-V3",
        "Mistral",
        "BLOOM",
        "Mamba",
        "RoBERTa as decoder",
    ],
)
def test_families_agree_with_each_answer_alone(family, four_texts):
    model = FAMILIES[family].model(RIGHT).eval()
    found = LogitsModel(model, ANSWERS)(four_texts)
    expected = expected_logits(model, with_choices(four_texts))
    assert_close(found, expected.to(found), **IN_FLOAT32)


# --- other inputs of each token -------------------------------------------------------


def with_types_of_one(batch: Batch) -> Batch:
    ones = torch.ones_like(batch["input_ids"])
    return batch | {"token_type_ids": ones}


def test_positions_go_on_behind_the_text(with_answers):
    (batch,) = ragged_batches(batch_size=8, padding_side="left")
    running = batch["attention_mask"].cumsum(1) - 1
    # What padding is given does not matter.
    positions = running.clamp_min(0)
    found = with_answers(batch | {"position_ids": positions})
    expected = with_answers(batch)
    assert_close(found, expected, **EXACT)


def test_token_types_go_on_behind_the_text(gpt2, with_answers):
    (batch,) = ragged_batches(batch_size=8, padding_side="left")
    choices = with_types_of_one(with_choices(batch))
    expected = LogitsModel(gpt2)(choices)
    found = with_answers(with_types_of_one(batch))
    assert_close(found, expected, **EXACT)
    # They matter to the model.
    without_types = with_answers(batch)
    assert not torch.allclose(found, without_types)


def test_other_inputs_of_each_token_are_refused(with_answers, eight_texts):
    boxes = torch.zeros(8, 7, 4)
    with_boxes = eight_texts | {"bbox": boxes}
    with pytest.raises(ValueError, match="The batch has bbox for each token"):
        with_answers(with_boxes)


# --- encoder-decoders -----------------------------------------------------------------


@pytest.fixture(params=["bart", "t5"])
def writer(request: pytest.FixtureRequest) -> nn.Module:
    """An encoder-decoder."""
    return encoder_decoder(request.param)


def written(
    writer: nn.Module,
    prompt: list[int],
    answer: list[int],
) -> Tensor:
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
    of_decoder = choices_batch(
        prompts=[[start]] * 4,
        choices=[ANSWERS] * 4,
    )
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
    gpt2,
    with_class_tokens,
    eight_texts,
):
    (choices,) = one_token_choices([eight_texts])
    _, found = logits_and_hidden_states(LogitsModel(gpt2), choices)
    _, expected = logits_and_hidden_states(with_class_tokens, eight_texts)
    assert_close(found, expected, **EXACT)


# --- log-probabilities ----------------------------------------------------------------


def test_log_probabilities_leave_room_for_all_that_begins_otherwise(
    gpt2,
    with_answers,
    eight_texts,
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
        prompts=[[5, 6], [7, 8]],
        choices=[
            [[3, 9, 4], [3, 9, 2]],
            [[3, 1], [3, 2, 5]],
        ],
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


@pytest.mark.parametrize(
    ("economises", "normalised"), [(False, True), (True, False), (True, True)]
)
@pytest.mark.parametrize(
    "make_batch",
    [
        with_one_beginning,
        with_another_prompt_of_one_choice,
        with_a_beginning_that_does_not_count,
    ],
)
def test_what_choices_have_in_common_counts_as_their_mask_says(
    gpt2, make_batch, normalised, economises
):
    batch = make_batch()
    logits_model = LogitsModel(gpt2, normalised=normalised)
    if economises:
        logits_model.economise()
    expected = expected_logits(gpt2, batch, normalised)
    for _ in range(2):  # with the proof, and without it
        assert_close(logits_model(batch), expected, **EXACT)


# --- prompts that are read once -------------------------------------------------------


def tokens_read(model: nn.Module) -> list[int]:
    """Make a list that gets how many tokens each call of a model reads."""
    read: list[int] = []

    def note(
        module: nn.Module,
        args: Any,
        kwargs: dict[str, Any],
    ) -> None:
        ids = kwargs["input_ids"]
        read.append(ids.numel())

    model.register_forward_pre_hook(note, with_kwargs=True)
    return read


def minimax() -> nn.Module:
    """Make a model whose cache is a subclass with a state of its own."""
    config = transformers.MiniMaxConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        layer_types=["linear_attention", "full_attention"],
        experts_implementation="eager",
    )
    torch.manual_seed(0)
    return transformers.MiniMaxForCausalLM(config)


SHARING = [
    "Llama",
    "Qwen3",
    "Gemma",
    "Phi-3",
    "GPT-NeoX",
    "GPT-J",
    "OPT",
    "Falcon",
    "DeepSeek-V3",
    "RoBERTa as decoder",
    "BLOOM",
]
# Windows, or states.
NOT_SHARING = [
    "Mistral",
    "Gemma 3",
    "Mamba",
    "MiniMax",
]


def of_family(family: str) -> nn.Module:
    if family == "MiniMax":
        return minimax().eval()
    return FAMILIES[family].model(RIGHT).eval()


def economising(model: nn.Module, **keywords: Any) -> LogitsModel:
    """Make a model of `ANSWERS` that reads their prompts once."""
    logits_model = LogitsModel(model, ANSWERS, **keywords)
    logits_model.economise()
    return logits_model


def logits_and_gradients(
    logits_model: LogitsModel,
    batch: Batch,
    weights: list[nn.Parameter],
) -> list[Tensor | None]:
    """Differentiate a drawn combination of the logits in some weights."""
    logits = logits_model(batch)
    direction = torch.randn(logits.shape, generator=generator())
    total = (logits * direction).sum()
    gradients = torch.autograd.grad(
        total,
        weights,
        allow_unused=True,
    )
    return [logits, *gradients]


@pytest.mark.parametrize("family", SHARING + NOT_SHARING)
def test_prompts_that_are_read_once_change_nothing(family):
    model = of_family(family)
    plain = LogitsModel(model, ANSWERS)
    sharing = economising(model)
    weights = [
        weight.requires_grad_()
        for name, weight in model.named_parameters()
        if "lora_" in name or family == "MiniMax"
    ]
    read = tokens_read(model)
    for batch in ragged_batches(batch_size=4):
        found = logits_and_gradients(sharing, batch, weights)
        expected = logits_and_gradients(plain, batch, weights)
        assert_close(found, expected, **IN_FLOAT32)
    # The second batch, whose shortest prompt has two tokens: of these one is read once,
    # and the other one predicts.
    n_rows = 4 * len(ANSWERS)
    whole = n_rows * (7 + MOST_READ)
    if family in SHARING:
        assert read[-3:] == [4, whole - n_rows, whole]
    else:
        assert read[-2:] == [whole, whole]


@pytest.mark.parametrize(("side", "normalised"), [("left", False), ("right", True)])
def test_shared_prompts_give_choices_of_each_text_the_same_logits(
    gpt2, side, normalised
):
    sharing = LogitsModel(gpt2, normalised=normalised)
    sharing.economise()
    for batch in batches_of_own_choices(side):
        expected = expected_logits(gpt2, batch, normalised)
        assert_close(sharing(batch), expected, **EXACT)


def test_a_cache_that_is_found_unlike_is_used_no_more(gpt2, four_texts, with_answers):
    expected = with_answers(four_texts)
    sharing = economising(gpt2)
    gpt2.register_forward_pre_hook(change_first_tokens_of_caching, with_kwargs=True)
    assert_close(sharing(four_texts), expected, **EXACT)
    read = tokens_read(gpt2)
    assert_close(sharing(four_texts), expected, **EXACT)
    assert len(read) == 1


def change_first_tokens_of_caching(
    module: nn.Module,
    args: Any,
    kwargs: dict[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """Make passes wrong that cache what they compute."""
    if kwargs["use_cache"]:
        kwargs = kwargs | {"input_ids": kwargs["input_ids"].roll(1, 0)}
    return args, kwargs


@pytest.mark.parametrize(
    ("kfac_approx", "is_training", "n_passes"),
    [
        ("gradient", False, 2),
        # It counts positions.
        ("expand", False, 1),
        # Dropout is another for prompts and answers.
        ("gradient", True, 1),
    ],
)
def test_where_prompts_are_shared(gpt2, four_texts, kfac_approx, is_training, n_passes):
    la = make(
        gpt2, class_token_ids=ANSWERS, backend_kwargs={"kfac_approx": kfac_approx}
    )
    gpt2.train(is_training)
    la.model(four_texts)  # for the proof
    read = tokens_read(gpt2)
    la.model(four_texts)
    assert len(read) == n_passes


# --- what is refused ------------------------------------------------------------------


def count_none_of_a_choice(batch: Batch) -> None:
    batch["score_mask"][1, 2] = 0


def count_padding(batch: Batch) -> None:
    batch["score_mask"][batch["attention_mask"] == 0] = 1


def count_a_first_token(batch: Batch) -> None:
    batch["score_mask"][0, 1, 0] = 1


def narrow_the_mask(batch: Batch) -> None:
    batch["score_mask"] = batch["score_mask"][..., :-1]


def keep_one_choice(batch: Batch) -> None:
    for key in ("input_ids", "attention_mask", "score_mask"):
        batch[key] = batch[key][:, :1]


def drop_the_dimension_of_choices(batch: Batch) -> None:
    for key in ("input_ids", "attention_mask", "score_mask"):
        batch[key] = batch[key][:, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            count_none_of_a_choice,
            "Choice 2 of text 1 has no token that counts",
        ),
        (
            count_padding,
            "is padding, or the first of its text",
        ),
        (
            count_a_first_token,
            "counts token 0 of choice 1 of text 0",
        ),
        (
            narrow_the_mask,
            "score_mask has shape .* say for each token whether it counts",
        ),
        (
            keep_one_choice,
            "two choices or more, not",
        ),
        (
            drop_the_dimension_of_choices,
            "must be of shape .texts, choices, tokens.",
        ),
    ],
)
def test_masks_that_make_no_sense_are_refused_in_a_sentence(change, message):
    batch, _ = batches_of_own_choices()
    change(batch)
    la = make(lora_model("gpt2"))
    with pytest.raises(ValueError, match=message):
        la.fit([batch])


def test_a_batch_with_choices_needs_no_answers(gpt2):
    choices = batches_of_own_choices()
    la = make(gpt2, class_token_ids=ANSWERS)
    message = "leave out class_token_ids and class_texts"
    with pytest.raises(ValueError, match=message):
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
        ([[1, 2], []], "Class 1 has no token"),
        ([[1, 2], [1, 2]], "two or more distinct answers"),
        ([[1, 2]], "two or more distinct answers"),
        ([[1, 2], [3, VOCABULARY]], "vocabulary"),
        ([[1, 2], ["3"]], "must be numbers of tokens"),
    ],
)
def test_answers_are_distinct_and_of_the_vocabulary(gpt2, answers, message):
    with pytest.raises(ValueError, match=message):
        laplace_lora_ext.Laplace(gpt2, class_token_ids=answers)


def test_tokens_beyond_a_trimmed_output_layer_are_named(trimmed, eight_texts):
    logits_model = LogitsModel(trimmed, [[11, 5], [42]])
    with pytest.raises(ValueError, match=r"up to 42, .* has only 40"):
        logits_model(eight_texts)


def test_a_masked_language_model_answers_with_one_token():
    with pytest.raises(ValueError, match="answers with one token"):
        LogitsModel(built("BertForMaskedLM"), ANSWERS, mask_token_id=7)


# --- texts ----------------------------------------------------------------------------


@pytest.fixture
def tokenizer(tmp_path):
    write_adapter(tmp_path, "gpt2")
    return AutoTokenizer.from_pretrained(tmp_path)


def of_texts(
    model: nn.Module,
    texts: Any,
    **more: Any,
):
    """Make a posterior whose answers are given as texts."""
    return laplace_lora_ext.Laplace(
        model,
        class_texts=texts,
        **more,
    )


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
    ("texts", "message"),
    [
        (["A", " "], "' ' in class_texts has no token"),
        ("AB", "must be a list of texts"),
        ([1, 2], "tokens go to class_token_ids"),
    ],
)
def test_class_texts_that_are_none_are_refused(gpt2, texts, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        of_texts(gpt2, texts, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({}, "need the model's tokenizer"),
        ({"class_token_ids": [1, 2]}, "not both"),
    ],
)
def test_class_texts_need_a_tokenizer_and_no_tokens(gpt2, others, message):
    with pytest.raises(ValueError, match=message):
        of_texts(gpt2, ["which", "A"], **others)


# --- a collator -----------------------------------------------------------------------

FEATURES = [
    {
        "prompt": "Question : which one ?",
        "choices": ["A", "B C"],
        "labels": 1,
    },
    {
        "prompt": "which ?",
        "choices": ["which one", "A B C"],
        "labels": 0,
    },
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


def test_a_collator_refuses_an_empty_choice(collator):
    with_an_empty_one = FEATURES[0] | {"choices": ["A", ""]}
    with pytest.raises(ValueError, match="has no token"):
        collator([with_an_empty_one])


def test_a_collator_refuses_other_numbers_of_choices(collator):
    of_two, second = FEATURES
    of_three = second | {"choices": ["A", "B", "C"]}
    with pytest.raises(ValueError, match=r"have \[2, 3\] choices"):
        collator([of_two, of_three])
