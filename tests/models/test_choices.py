"""Logits of answers of several tokens, wherever the padding is."""

from typing import Any

import pytest
import torch
from torch import nn
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
    llama,
    llama_with_output_layer,
    lora_model,
    ragged_batches,
    record_calls,
)
from tests.support.posteriors import generator, make
from tests.support.texts import encoder_decoder
from tests.test_readme import WORDS, write_adapter

EXACT = {"rtol": 1e-9, "atol": 1e-9}
IN_FLOAT32 = {"rtol": 1e-4, "atol": 1e-4}


def four_texts() -> dict[str, torch.Tensor]:
    """Make a batch of texts, padded to the seven tokens of the longest."""
    (batch,) = ragged_batches(batch_size=4, lengths=(7, 4, 5, 3))
    return batch


def expected_logits(
    model: Any,
    batch: Any,
    normalised: bool = False,
) -> torch.Tensor:
    """Score each choice by a pass of its own, `(B, K)`."""
    of_texts = []
    with torch.no_grad():
        for choices in unpadded_choices(batch):
            of_texts.append(logits_of_choices(model, choices, normalised))
    return torch.stack(of_texts)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox"])
def test_logits_are_sums_over_the_tokens_of_each_choice_alone(kind, side, normalised):
    model = lora_model(kind).eval()
    logits_model = LogitsModel(model, normalised=normalised)
    for batch in batches_of_own_choices(side):
        found = logits_model(batch)
        expected = expected_logits(model, batch, normalised)
        assert_close(found, expected, **EXACT)
        for dtype in (torch.bool, torch.float32, torch.uint8):
            counts = batch["score_mask"].to(dtype)
            of_dtype = logits_model(batch | {"score_mask": counts})
            assert torch.equal(of_dtype, found)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_answers_of_all_texts_are_choices_of_each(side, normalised):
    model = lora_model("gpt2").eval()
    of_answers = LogitsModel(model, ANSWERS, normalised=normalised)
    for batch in ragged_batches(padding_side=side):
        (choices,) = of_prompts([batch], ANSWERS)
        expected = expected_logits(model, choices, normalised)
        assert_close(of_answers(batch), expected, **EXACT)


@pytest.mark.parametrize("normalised", [False, True])
def test_a_batch_without_a_mask_has_no_padding(normalised):
    model = lora_model("gpt2").eval()
    of_answers = LogitsModel(model, ANSWERS, normalised=normalised)
    for batch in ragged_batches():
        ids = batch["input_ids"][:1, :2]
        choices = choices_batch(ids.tolist(), [ANSWERS])
        expected = expected_logits(model, choices, normalised)
        assert_close(of_answers({"input_ids": ids}), expected, **EXACT)


def test_an_adapter_in_the_output_layer_takes_part_and_only_what_counts_is_read():
    model = llama_with_output_layer().eval()
    (batch,) = ragged_batches(batch_size=8)
    of_model = model.base_model.model
    calls = record_calls(of_model)
    shapes = []

    def note_shape(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        shapes.append(output.shape)

    of_model.lm_head.register_forward_hook(note_shape)
    found = LogitsModel(model, ANSWERS)(batch)
    n_texts = 8 * len(ANSWERS)
    # Answers have up to three tokens.
    assert shapes == [(n_texts, 3, VOCABULARY)]
    # The last token of an answer is predicted, and never read.
    assert calls[0]["input_ids"].shape == (n_texts, 7 + 2)
    assert calls[0]["use_cache"] is False
    (choices,) = of_prompts([batch], ANSWERS)
    assert_close(found, expected_logits(model, choices), **IN_FLOAT32)


def test_wrappers_of_batches_answer_too():
    model = lora_model("gpt2").eval()
    (batch,) = ragged_batches(batch_size=8)
    found = LogitsModel(OfBatches(model), ANSWERS)(batch)
    assert_close(found, LogitsModel(model, ANSWERS)(batch), **EXACT)


def test_positions_go_on_behind_the_text():
    of_answers = LogitsModel(lora_model("gpt2").eval(), ANSWERS)
    (batch,) = ragged_batches(batch_size=8, padding_side="left")
    running = batch["attention_mask"].cumsum(1) - 1
    with_positions = batch | {"position_ids": running.clamp_min(0)}
    assert_close(of_answers(with_positions), of_answers(batch), **EXACT)


def with_types_of_one(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return batch | {"token_type_ids": torch.ones_like(batch["input_ids"])}


def test_token_types_go_on_behind_the_text():
    model = lora_model("gpt2").eval()
    of_answers = LogitsModel(model, ANSWERS)
    (batch,) = ragged_batches(batch_size=8, padding_side="left")
    found = of_answers(with_types_of_one(batch))
    (choices,) = of_prompts([batch], ANSWERS)
    expected = LogitsModel(model)(with_types_of_one(choices))
    assert_close(found, expected, **EXACT)
    # They matter to the model.
    assert not torch.allclose(found, of_answers(batch))


def test_other_inputs_of_each_token_are_refused():
    of_answers = LogitsModel(lora_model("gpt2").eval(), ANSWERS)
    (batch,) = ragged_batches(batch_size=8)
    with_boxes = batch | {"bbox": torch.zeros(8, 7, 4)}
    with pytest.raises(ValueError, match="The batch has bbox for each token"):
        of_answers(with_boxes)


@pytest.mark.parametrize(
    "family", ["Llama", "Gemma 3", "OPT", "BLOOM", "Mamba", "RoBERTa as decoder"]
)
def test_families_agree_with_each_answer_alone(family):
    model = FAMILIES[family].model(RIGHT).eval()
    batch = four_texts()
    (choices,) = of_prompts([batch], ANSWERS)
    found = LogitsModel(model, ANSWERS)(batch)
    assert_close(found, expected_logits(model, choices).to(found), **IN_FLOAT32)


@pytest.fixture(params=["bart", "t5"])
def writer(request: pytest.FixtureRequest) -> nn.Module:
    """An encoder-decoder."""
    return encoder_decoder(request.param)


def test_an_encoder_decoder_writes_its_answers(writer):
    batch = four_texts()
    start = writer.config.decoder_start_token_id
    found = LogitsModel(writer, ANSWERS)(batch)
    for row, prompt in enumerate(prompts_of(batch)):
        for number, answer in enumerate(ANSWERS):
            text = torch.tensor([prompt])
            decoded = torch.tensor([[start, *answer]])
            with torch.no_grad():
                output = writer(input_ids=text, decoder_input_ids=decoded)
            log_p = output.logits[0].log_softmax(-1)
            # The last place would predict what comes behind the answer.
            places = torch.arange(len(answer))
            expected = log_p[places, answer].sum()
            assert_close(found[row, number], expected, **EXACT)


def test_an_encoder_decoder_reads_the_text_of_its_choices_once(writer):
    batch = four_texts()
    start = writer.config.decoder_start_token_id
    of_decoder = choices_batch([[start]] * 4, [ANSWERS] * 4)
    choices = {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "decoder_input_ids": of_decoder["input_ids"],
        "score_mask": of_decoder["score_mask"],
    }
    found = LogitsModel(writer)(choices)
    expected = LogitsModel(writer, ANSWERS)(batch)
    assert_close(found, expected, **EXACT)


def test_answers_of_one_token_are_class_tokens():
    model = lora_model("gpt2").eval()
    (batch,) = ragged_batches(batch_size=8)
    plain = LogitsModel(model, CLASS_TOKEN_IDS)
    nested = LogitsModel(model, [[token] for token in CLASS_TOKEN_IDS])
    assert nested.class_token_ids == CLASS_TOKEN_IDS
    assert torch.equal(nested(batch), plain(batch))


def test_choices_of_one_token_are_class_tokens():
    model = lora_model("gpt2").eval()
    (batch,) = ragged_batches(batch_size=8)
    (choices,) = one_token_choices([batch])
    plain = LogitsModel(model, CLASS_TOKEN_IDS)
    as_choices = LogitsModel(model)
    # Logits of choices are log-probabilities, which differ from logits by a constant.
    found = as_choices(choices).softmax(-1)
    expected = plain(batch).softmax(-1)
    assert_close(found, expected, rtol=1e-10, atol=1e-12)
    # What variances are learnt from is the same too.
    _, hidden = logits_and_hidden_states(as_choices, choices)
    _, expected = logits_and_hidden_states(plain, batch)
    assert_close(hidden, expected, **EXACT)


def test_log_probabilities_leave_room_for_all_that_begins_otherwise():
    model = lora_model("gpt2").eval()
    (batch,) = ragged_batches(batch_size=8)
    of_answers = LogitsModel(model, ANSWERS)
    log_p = of_answers.log_probs(batch)
    ones = torch.ones(8).double()
    assert_close(log_p.exp().sum(-1), ones, **EXACT)

    of_vocabulary = LogitsModel(model, list(range(VOCABULARY)))
    p_of_tokens = of_vocabulary(batch).softmax(-1)
    # All answers begin with one of these two tokens.
    p_of_beginnings = p_of_tokens[:, 11] + p_of_tokens[:, 23]
    *_, log_others = log_p.unbind(-1)
    assert_close(log_others.exp(), 1 - p_of_beginnings, **EXACT)
    among_answers = log_p[:, :-1].softmax(-1)
    assert_close(among_answers, of_answers(batch).softmax(-1), **EXACT)


# --- prompts that are read once -------------------------------------------------------


def tokens_read(model: Any) -> list[int]:
    """Make a list that gets how many tokens each call of a model reads."""
    read: list[int] = []

    def note(
        _: nn.Module,
        args: Any,
        kwargs: dict[str, Any],
    ) -> None:
        read.append(kwargs["input_ids"].numel())

    model.register_forward_pre_hook(note, with_kwargs=True)
    return read


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
]
# Windows, states, positions of their own, or none that can be told.
NOT_SHARING = ["Mistral", "Gemma 3", "Mamba", "RoBERTa as decoder", "BLOOM"]


def with_shared_prompts(logits_model: LogitsModel) -> LogitsModel:
    """Let a model of logits read each prompt once, for all of its answers."""
    logits_model.share_prompts()
    return logits_model


def logits_and_gradients(
    logits_model: LogitsModel,
    batch: dict[str, torch.Tensor],
    weights: list[nn.Parameter],
) -> list[torch.Tensor | None]:
    """Differentiate a drawn combination of the logits in some weights."""
    logits = logits_model(batch)
    direction = torch.randn(logits.shape, generator=generator())
    total = (logits * direction).sum()
    gradients = torch.autograd.grad(total, weights, allow_unused=True)
    return [logits, *gradients]


@pytest.mark.parametrize("family", SHARING + NOT_SHARING)
def test_prompts_are_read_once_where_that_changes_nothing(family):
    model = FAMILIES[family].model(RIGHT).eval()
    plain = LogitsModel(model, ANSWERS)
    sharing = with_shared_prompts(LogitsModel(model, ANSWERS))
    lora = [weight for name, weight in model.named_parameters() if "lora_" in name]
    for weight in lora:
        weight.requires_grad_()
    for batch in ragged_batches(batch_size=4):
        found = logits_and_gradients(sharing, batch, lora)
        expected = logits_and_gradients(plain, batch, lora)
        assert_close(found, expected, **IN_FLOAT32)

    read = tokens_read(model)
    sharing(four_texts())
    # Answers have up to three tokens, of which the last is not read.
    if family in SHARING:
        prompts, answers = read
        assert prompts == 4 * 7
        assert answers == 4 * len(ANSWERS) * 2
    else:
        assert read[-1] == 4 * len(ANSWERS) * (7 + 2)


def assert_twice_alike(
    sharing: LogitsModel, plain: LogitsModel, batch: dict[str, torch.Tensor]
) -> None:
    """Compare logits at first, with the proof of the batch's kind, and without it."""
    expected = plain(batch)
    for _ in range(2):
        assert_close(sharing(batch), expected, **EXACT)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_shared_prompts_give_the_same_logits_to_choices_of_each_text(side, normalised):
    model = lora_model("gpt2").eval()
    plain = LogitsModel(model, normalised=normalised)
    sharing = with_shared_prompts(LogitsModel(model, normalised=normalised))
    for batch in [*batches_of_own_choices(side), *one_token_choices(ragged_batches())]:
        assert_twice_alike(sharing, plain, batch)

    # What is common to all choices may count as well, and prompts may differ.
    same = choices_batch(
        prompts=[[5, 6], [7, 8]],
        choices=[
            [[3, 9, 4], [3, 9, 2]],
            [[3, 1], [3, 2, 5]],
        ],
    )
    assert_twice_alike(sharing, plain, same)
    ids = same["input_ids"].clone()
    ids[:, 1, 0] = 30
    of_other_prompts = same | {"input_ids": ids}
    assert_twice_alike(sharing, plain, of_other_prompts)
    counts = same["score_mask"].clone()
    counts[..., 2] = 0
    without_what_is_common = same | {"score_mask": counts}
    assert_twice_alike(sharing, plain, without_what_is_common)


def test_a_kind_of_batch_is_proven_before_it_is_trusted():
    model = lora_model("gpt2").eval()
    sharing = with_shared_prompts(LogitsModel(model, ANSWERS))
    (even,) = ragged_batches(lengths=(6, 6, 6), padded_to=6)
    (ragged,) = ragged_batches(lengths=(6, 4, 5), padded_to=6)
    read = tokens_read(model)
    for batch in (even, ragged):
        read.clear()
        sharing(batch)
        # Prompts, answers, and for comparison both at once.
        assert len(read) == 3
        read.clear()
        sharing(batch)
        assert len(read) == 2


def test_a_kind_of_batch_that_is_found_unlike_stays_apart():
    model = lora_model("gpt2").eval()
    (batch,) = ragged_batches(lengths=(6, 4, 5), padded_to=6)
    expected = LogitsModel(model, ANSWERS)(batch)

    def shift_positions(
        module: nn.Module,
        args: Any,
        kwargs: dict[str, Any],
    ) -> tuple[Any, dict[str, Any]]:
        if kwargs["use_cache"]:
            kwargs = {**kwargs, "position_ids": kwargs["position_ids"] + 1}
        return args, kwargs

    model.register_forward_pre_hook(shift_positions, with_kwargs=True)
    sharing = with_shared_prompts(LogitsModel(model, ANSWERS))
    assert_close(sharing(batch), expected, **EXACT)
    read = tokens_read(model)
    assert_close(sharing(batch), expected, **EXACT)
    assert len(read) == 1


@pytest.mark.parametrize(("kfac_approx", "n_passes"), [("gradient", 2), ("expand", 1)])
def test_only_statistics_that_count_no_positions_share_prompts(kfac_approx, n_passes):
    model = lora_model("gpt2")
    settings = {"kfac_approx": kfac_approx}
    la = make(model, class_token_ids=ANSWERS, backend_kwargs=settings)
    batch, *_ = ragged_batches(batch_size=4)
    read = tokens_read(model)
    la.model(batch)  # in training, with dropout
    assert len(read) == 1
    model.eval()
    la.model(batch)
    read.clear()  # of the proof
    la.model(batch)
    assert len(read) == n_passes


# --- what is refused ------------------------------------------------------------------


def count_none_of_a_choice(batch: dict[str, torch.Tensor]) -> None:
    batch["score_mask"][1, 2] = 0


def count_padding(batch: dict[str, torch.Tensor]) -> None:
    batch["score_mask"][batch["attention_mask"] == 0] = 1


def count_a_first_token(batch: dict[str, torch.Tensor]) -> None:
    batch["score_mask"][0, 1, 0] = 1


def narrow_the_mask(batch: dict[str, torch.Tensor]) -> None:
    batch["score_mask"] = batch["score_mask"][..., :-1]


def keep_one_choice(batch: dict[str, torch.Tensor]) -> None:
    for key in ("input_ids", "attention_mask", "score_mask"):
        batch[key] = batch[key][:, :1]


def drop_the_dimension_of_choices(batch: dict[str, torch.Tensor]) -> None:
    for key in ("input_ids", "attention_mask", "score_mask"):
        batch[key] = batch[key][:, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (count_none_of_a_choice, "Choice 2 of text 1 has no token that counts"),
        (count_padding, "is padding, or the first of its text"),
        (count_a_first_token, "counts token 0 of choice 1 of text 0"),
        (
            narrow_the_mask,
            "score_mask has shape .* say for each token whether it counts",
        ),
        (keep_one_choice, "two choices or more, not"),
        (
            drop_the_dimension_of_choices,
            "must be of shape .texts, choices, tokens.",
        ),
    ],
)
@pytest.mark.parametrize("structure", ["lowrank_kron", "diag"])
def test_masks_that_make_no_sense_are_refused_in_a_sentence(change, message, structure):
    batch, _ = batches_of_own_choices()
    change(batch)
    la = make(lora_model("gpt2"), structure)
    with pytest.raises(ValueError, match=message):
        la.fit([batch])


def test_a_batch_has_choices_or_the_posterior_answers():
    model = lora_model("gpt2")
    choices, _ = batches_of_own_choices()
    with_answers = make(model, class_token_ids=ANSWERS)
    with pytest.raises(ValueError, match="leave out class_token_ids and class_texts"):
        with_answers.fit([choices])
    without_answers = make(model)
    message = r"pass class_token_ids, .*class_texts.*score_mask"
    with pytest.raises(ValueError, match=message):
        without_answers.fit(ragged_batches())
    with pytest.raises(ValueError, match="normalised=True takes means"):
        make(lora_model("bert"), normalised=True)


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
def test_answers_are_distinct_and_of_the_vocabulary(answers, message):
    with pytest.raises(ValueError, match=message):
        laplace_lora_ext.Laplace(lora_model("gpt2"), class_token_ids=answers)


def test_tokens_beyond_a_trimmed_output_layer_are_named():
    model = llama().eval()
    kept = model.lm_head.weight.data[:40].clone()
    model.lm_head = nn.Linear(16, 40, bias=False)
    model.lm_head.weight.data.copy_(kept)
    batch = ragged_batches()[0]
    for each in (model, OfBatches(model)):
        logits_model = LogitsModel(each, [[11, 5], [42]])
        with pytest.raises(ValueError, match=r"up to 42, .* has only 40"):
            logits_model(batch)


def test_a_masked_language_model_answers_with_one_token():
    with pytest.raises(ValueError, match="answers with one token"):
        LogitsModel(built("BertForMaskedLM"), ANSWERS, mask_token_id=7)


# --- texts ----------------------------------------------------------------------------


@pytest.fixture
def tokenizer(tmp_path):
    write_adapter(tmp_path, "gpt2")
    return AutoTokenizer.from_pretrained(tmp_path)


def test_class_texts_are_tokenized_as_they_stand(tokenizer):
    texts = ["which one", "which", "A B C"]
    model = lora_model("gpt2")
    la = laplace_lora_ext.Laplace(model, class_texts=texts, tokenizer=tokenizer)
    assert la.likelihood == "classification"
    expected = [[WORDS.index(word) for word in text.split()] for text in texts]
    assert la.model.class_token_ids == expected


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["A", " "], "' ' in class_texts has no token"),
        ("AB", "must be a list of texts"),
        ([1, 2], "tokens go to class_token_ids"),
    ],
)
def test_class_texts_that_are_none_are_refused(texts, message, tokenizer):
    model = lora_model("gpt2")
    with pytest.raises(ValueError, match=message):
        laplace_lora_ext.Laplace(model, class_texts=texts, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({}, "need the model's tokenizer"),
        ({"class_token_ids": [1, 2]}, "not both"),
    ],
)
def test_class_texts_need_a_tokenizer_and_no_tokens(others, message):
    model = lora_model("gpt2")
    texts = ["which", "A"]
    with pytest.raises(ValueError, match=message):
        laplace_lora_ext.Laplace(model, class_texts=texts, **others)


FEATURES = [
    {"prompt": "Question : which one ?", "choices": ["A", "B C"], "labels": 1},
    {"prompt": "which ?", "choices": ["which one", "A B C"], "labels": 0},
]


def test_a_collator_makes_batches_of_choices(tokenizer):
    batch = DataCollatorForChoices(tokenizer)(FEATURES)
    prompts = []
    choices = []
    for feature in FEATURES:
        prompts.append(tokenizer(feature["prompt"])["input_ids"])
        choices.append(tokenizer(feature["choices"])["input_ids"])
    expected = choices_batch(prompts, choices)
    for key, value in expected.items():
        assert torch.equal(batch[key], value)
    assert batch["labels"].tolist() == [1, 0]
    assert LogitsModel(lora_model("gpt2"))(batch).shape == (2, 2)


def test_a_collator_cuts_prompts_at_their_start(tokenizer):
    cut = DataCollatorForChoices(tokenizer, max_length=5)(FEATURES)
    kept = tokenizer("which one ? B C")["input_ids"]
    assert cut["input_ids"][0, 1].tolist() == kept
    too_short = DataCollatorForChoices(tokenizer, max_length=3)
    with pytest.raises(ValueError, match="raise it"):
        too_short(FEATURES)


def test_a_collator_refuses_an_empty_choice_and_other_numbers_of_choices(tokenizer):
    collator = DataCollatorForChoices(tokenizer)
    first, second = FEATURES
    with pytest.raises(ValueError, match="has no token"):
        collator([first | {"choices": ["A", ""]}])
    of_three = second | {"choices": ["A", "B", "C"]}
    with pytest.raises(ValueError, match=r"have \[2, 3\] choices"):
        collator([first, of_three])
