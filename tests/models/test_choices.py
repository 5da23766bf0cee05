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
from tests.support.posteriors import make
from tests.support.texts import encoder_decoder
from tests.test_readme import WORDS, write_adapter

EXACT = {"rtol": 1e-9, "atol": 1e-9}
IN_FLOAT32 = {"rtol": 1e-4, "atol": 1e-4}


def four_texts() -> dict[str, torch.Tensor]:
    (batch,) = ragged_batches(batch_size=4, lengths=(7, 4, 5, 3))
    return batch


def expected_logits(
    model: Any,
    batch: Any,
    normalised: bool = False,
) -> torch.Tensor:
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
    for batch in batches_of_own_choices(side):
        expected = expected_logits(model, batch, normalised)
        found = LogitsModel(model, normalised=normalised)(batch)
        assert_close(found, expected, **EXACT)
        for dtype in (torch.bool, torch.float32, torch.uint8):
            with_others = batch | {"score_mask": batch["score_mask"].to(dtype)}
            again = LogitsModel(model, normalised=normalised)(with_others)
            assert torch.equal(again, found)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_answers_of_all_texts_are_choices_of_each(side, normalised):
    model = lora_model("gpt2").eval()
    batches = ragged_batches(padding_side=side)
    of_answers = LogitsModel(model, ANSWERS, normalised=normalised)
    for batch, choices in zip(batches, of_prompts(batches, ANSWERS), strict=True):
        expected = expected_logits(model, choices, normalised)
        assert_close(of_answers(batch), expected, **EXACT)
        if side == "right":
            ids = batch["input_ids"][:1, :2]
            unmasked = choices_batch(ids.tolist(), [ANSWERS])
            expected = expected_logits(model, unmasked, normalised)
            assert_close(of_answers({"input_ids": ids}), expected, **EXACT)


def test_an_adapter_in_the_output_layer_takes_part_and_only_what_counts_is_read():
    model = llama_with_output_layer().eval()
    (batch,) = ragged_batches(batch_size=8)
    calls = record_calls(model.base_model.model)
    seen = []
    model.base_model.model.lm_head.register_forward_hook(
        lambda *args: seen.append(args[-1].shape)
    )
    found = LogitsModel(model, ANSWERS)(batch)
    assert seen == [(8 * len(ANSWERS), 3, VOCABULARY)]
    # The last token of an answer is predicted, and never read.
    assert calls[0]["input_ids"].shape == (8 * len(ANSWERS), 7 + 2)
    assert calls[0]["use_cache"] is False
    (choices,) = of_prompts([batch], ANSWERS)
    assert_close(found, expected_logits(model, choices), **IN_FLOAT32)


def test_wrappers_of_batches_answer_too():
    model = lora_model("gpt2").eval()
    (batch,) = ragged_batches(batch_size=8)
    found = LogitsModel(OfBatches(model), ANSWERS)(batch)
    assert_close(found, LogitsModel(model, ANSWERS)(batch), **EXACT)


def test_positions_and_token_types_go_on_behind_the_text():
    model = lora_model("gpt2").eval()
    (batch,) = ragged_batches(batch_size=8, padding_side="left")
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
    expected = LogitsModel(model, ANSWERS)(batch)
    found = LogitsModel(model, ANSWERS)(batch | {"position_ids": positions})
    assert_close(found, expected, **EXACT)
    types = torch.ones_like(positions)
    typed = batch | {"token_type_ids": types}
    choices = of_prompts([batch], ANSWERS)[0]
    of_choices = choices | {"token_type_ids": torch.ones_like(choices["input_ids"])}
    found = LogitsModel(model, ANSWERS)(typed)
    assert_close(found, LogitsModel(model)(of_choices), **EXACT)
    assert not torch.allclose(found, expected)
    with pytest.raises(ValueError, match="The batch has bbox for each token"):
        LogitsModel(model, ANSWERS)(batch | {"bbox": torch.zeros(8, 7, 4)})


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_an_encoder_decoder_writes_its_answers(kind):
    model = encoder_decoder(kind)
    batch = four_texts()
    start = model.config.decoder_start_token_id
    found = LogitsModel(model, ANSWERS)(batch)
    for row, prompt in enumerate(prompts_of(batch)):
        for number, answer in enumerate(ANSWERS):
            text = torch.tensor([prompt])
            decoded = torch.tensor([[start, *answer]])
            with torch.no_grad():
                output = model(input_ids=text, decoder_input_ids=decoded)
            log_p = output.logits[0].log_softmax(-1)
            expected = sum(log_p[place, token] for place, token in enumerate(answer))
            assert_close(found[row, number], expected, **EXACT)
    # The same as choices that the batch brings, whose texts are given once.
    texts = [[start]] * 4
    of_decoder = choices_batch(texts, [ANSWERS] * 4)
    choices = {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "decoder_input_ids": of_decoder["input_ids"],
        "score_mask": of_decoder["score_mask"],
    }
    assert_close(LogitsModel(model)(choices), found, **EXACT)


@pytest.mark.parametrize(
    "family", ["Llama", "Gemma 3", "OPT", "BLOOM", "Mamba", "RoBERTa as decoder"]
)
def test_families_agree_with_each_answer_alone(family):
    model = FAMILIES[family].model(RIGHT).eval()
    batch = four_texts()
    (choices,) = of_prompts([batch], ANSWERS)
    found = LogitsModel(model, ANSWERS)(batch)
    assert_close(found, expected_logits(model, choices).to(found), **IN_FLOAT32)


def test_answers_of_one_token_are_class_tokens():
    model = lora_model("gpt2").eval()
    (batch,) = ragged_batches(batch_size=8)
    plain = LogitsModel(model, CLASS_TOKEN_IDS)
    nested = LogitsModel(model, [[token] for token in CLASS_TOKEN_IDS])
    assert nested.class_token_ids == CLASS_TOKEN_IDS
    assert torch.equal(nested(batch), plain(batch))
    (choices,) = one_token_choices([batch])
    as_choices = LogitsModel(model)
    expected = plain(batch).softmax(-1)
    assert_close(as_choices(choices).softmax(-1), expected, rtol=1e-10, atol=1e-12)
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
    of_vocabulary = LogitsModel(model, list(range(VOCABULARY)))(batch)
    of_first_tokens = of_vocabulary.softmax(-1)[:, [11, 23]]
    # The last column is of all answers that begin otherwise.
    of_others = log_p[:, -1].exp()
    assert_close(of_others, 1 - of_first_tokens.sum(-1), **EXACT)
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


@pytest.mark.parametrize("family", SHARING + NOT_SHARING)
def test_prompts_are_read_once_where_that_changes_nothing(family):
    model = FAMILIES[family].model(RIGHT).eval()
    batches = ragged_batches(batch_size=4)
    plain = LogitsModel(model, ANSWERS)
    sharing = LogitsModel(model, ANSWERS)
    sharing.share_prompts()
    lora = [weight for name, weight in model.named_parameters() if "lora_" in name]
    for weight in lora:
        weight.requires_grad_()
    for batch in batches:
        vectors = torch.randn(
            4, len(ANSWERS), generator=torch.Generator().manual_seed(0)
        )
        gradients = []
        for each in (plain, sharing):
            logits = each(batch)
            total = (logits * vectors).sum()
            of_weights = torch.autograd.grad(total, lora, allow_unused=True)
            gradients.append([logits, *of_weights])
        assert_close(gradients[1], gradients[0], **IN_FLOAT32)
    read = tokens_read(model)
    batch = four_texts()
    sharing(batch)
    if family in SHARING:
        assert read == [4 * 7, 4 * len(ANSWERS) * 2]
    else:
        assert read[-1] == 4 * len(ANSWERS) * 9


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_shared_prompts_give_the_same_logits_to_choices_of_each_text(side, normalised):
    model = lora_model("gpt2").eval()
    plain = LogitsModel(model, normalised=normalised)
    sharing = LogitsModel(model, normalised=normalised)
    sharing.share_prompts()
    for batch in [*batches_of_own_choices(side), *one_token_choices(ragged_batches())]:
        for _ in range(2):  # with the proof, and without it
            assert_close(sharing(batch), plain(batch), **EXACT)
    # What is common to all choices may count as well, and prompts may differ.
    prompts = [[5, 6], [7, 8]]
    of_first = [[3, 9, 4], [3, 9, 2]]
    of_second = [[3, 1], [3, 2, 5]]
    same = choices_batch(prompts, [of_first, of_second])
    other = {key: value.clone() for key, value in same.items()}
    other["input_ids"][:, 1, 0] = 30
    later = same | {"score_mask": same["score_mask"].clone()}
    later["score_mask"][..., 2] = 0
    for batch in (same, other, later):
        for _ in range(2):
            assert_close(sharing(batch), plain(batch), **EXACT)


def test_a_kind_of_batch_is_proven_before_it_is_trusted():
    model = lora_model("gpt2").eval()
    sharing = LogitsModel(model, ANSWERS)
    sharing.share_prompts()
    (even,) = ragged_batches(lengths=(6, 6, 6), padded_to=6)
    (ragged,) = ragged_batches(lengths=(6, 4, 5), padded_to=6)
    read = tokens_read(model)
    for batch in (even, ragged):
        del read[:]
        sharing(batch)
        assert len(read) == 3
        del read[:]
        sharing(batch)
        assert len(read) == 2
    # What has been found unlike stays apart.
    unlike = LogitsModel(model, ANSWERS)
    unlike.share_prompts()

    def of_wrong_positions(
        _: nn.Module,
        args: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        if kwargs["use_cache"]:
            kwargs = {**kwargs, "position_ids": kwargs["position_ids"] + 1}
        return args, kwargs

    expected = LogitsModel(model, ANSWERS)(ragged)
    model.register_forward_pre_hook(of_wrong_positions, with_kwargs=True)
    for _ in range(2):
        del read[:]
        assert_close(unlike(ragged), expected, **EXACT)
    assert len(read) == 1


@pytest.mark.parametrize(("kfac_approx", "n_passes"), [("gradient", 2), ("expand", 1)])
def test_only_statistics_that_count_no_positions_share_prompts(kfac_approx, n_passes):
    model = lora_model("gpt2")
    la = make(
        model, class_token_ids=ANSWERS, backend_kwargs={"kfac_approx": kfac_approx}
    )
    batch, *_ = ragged_batches(batch_size=4)
    read = tokens_read(model)
    la.model(batch)  # in training, with dropout
    assert len(read) == 1
    model.eval()
    la.model(batch)
    del read[:]
    la.model(batch)
    assert len(read) == n_passes


# --- what is refused ------------------------------------------------------------------


def altered(change: Any) -> dict[str, torch.Tensor]:
    batch = {key: value.clone() for key, value in batches_of_own_choices()[0].items()}
    change(batch)
    return batch


def without_counting(batch: dict[str, torch.Tensor]) -> None:
    batch["score_mask"][1, 2] = 0


def counting_padding(batch: dict[str, torch.Tensor]) -> None:
    batch["score_mask"][batch["attention_mask"] == 0] = 1


def counting_the_first(batch: dict[str, torch.Tensor]) -> None:
    batch["score_mask"][0, 1, 0] = 1


def of_another_shape(batch: dict[str, torch.Tensor]) -> None:
    batch["score_mask"] = batch["score_mask"][..., :-1]


def of_one_choice(batch: dict[str, torch.Tensor]) -> None:
    for key in ("input_ids", "attention_mask", "score_mask"):
        batch[key] = batch[key][:, :1]


def of_texts(batch: dict[str, torch.Tensor]) -> None:
    for key in ("input_ids", "attention_mask", "score_mask"):
        batch[key] = batch[key][:, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_counting, "Choice 2 of text 1 has no token that counts"),
        (counting_padding, "is padding, or the first of its text"),
        (counting_the_first, "counts token 0 of choice 1 of text 0"),
        (
            of_another_shape,
            "score_mask has shape .* say for each token whether it counts",
        ),
        (of_one_choice, "two choices or more, not"),
        (of_texts, "must be of shape .texts, choices, tokens."),
    ],
)
@pytest.mark.parametrize("structure", ["lowrank_kron", "diag"])
def test_masks_that_make_no_sense_are_refused_in_a_sentence(change, message, structure):
    la = make(lora_model("gpt2"), structure)
    with pytest.raises(ValueError, match=message):
        la.fit([altered(change)])


def test_a_batch_has_choices_or_the_posterior_answers():
    model = lora_model("gpt2")
    choices, _ = batches_of_own_choices()
    with pytest.raises(ValueError, match="leave out class_token_ids and class_texts"):
        make(model, class_token_ids=ANSWERS).fit([choices])
    with pytest.raises(
        ValueError, match=r"pass class_token_ids, .*class_texts.*score_mask"
    ):
        make(model).fit(ragged_batches())
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
    for each in (model, OfBatches(model)):
        with pytest.raises(ValueError, match=r"up to 42, .* has only 40"):
            LogitsModel(each, [[11, 5], [42]])(ragged_batches()[0])


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
    la = laplace_lora_ext.Laplace(
        lora_model("gpt2"), class_texts=texts, tokenizer=tokenizer
    )
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
    with pytest.raises(ValueError, match=message):
        laplace_lora_ext.Laplace(
            lora_model("gpt2"), class_texts=texts, tokenizer=tokenizer
        )


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({}, "need the model's tokenizer"),
        ({"class_token_ids": [1, 2]}, "not both"),
    ],
)
def test_class_texts_need_a_tokenizer_and_no_tokens(others, message):
    with pytest.raises(ValueError, match=message):
        laplace_lora_ext.Laplace(
            lora_model("gpt2"), class_texts=["which", "A"], **others
        )


def test_a_collator_makes_batches_of_choices(tokenizer):
    features = [
        {"prompt": "Question : which one ?", "choices": ["A", "B C"], "labels": 1},
        {"prompt": "which ?", "choices": ["which one", "A B C"], "labels": 0},
    ]
    batch = DataCollatorForChoices(tokenizer)(features)

    def ids(text: str) -> list[int]:
        return tokenizer(text)["input_ids"]

    expected = choices_batch(
        [ids(feature["prompt"]) for feature in features],
        [[ids(choice) for choice in feature["choices"]] for feature in features],
    )
    for key, value in expected.items():
        assert torch.equal(batch[key], value)
    assert batch["labels"].tolist() == [1, 0]
    assert LogitsModel(lora_model("gpt2"))(batch).shape == (2, 2)

    cut = DataCollatorForChoices(tokenizer, max_length=5)(features)
    assert cut["input_ids"][0, 1].tolist() == ids("which one ? B C")
    with pytest.raises(ValueError, match="raise it"):
        DataCollatorForChoices(tokenizer, max_length=3)(features)
    with pytest.raises(ValueError, match="has no token"):
        DataCollatorForChoices(tokenizer)([features[0] | {"choices": ["A", ""]}])
    with pytest.raises(ValueError, match=r"have \[2, 3\] choices"):
        DataCollatorForChoices(tokenizer)(
            [features[0], features[1] | {"choices": ["A", "B", "C"]}]
        )
