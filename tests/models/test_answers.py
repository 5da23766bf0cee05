"""Logits of a language model's answers, wherever the padding is."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from laplace_lora_ext.models.answers import AnswerTokens
from laplace_lora_ext.models.logits_model import LogitsModel
from tests.support.models import (
    CLASS_TOKEN_IDS,
    VOCABULARY,
    base_model,
    image_first,
    llama,
    llama_with_output_layer,
    lora_model,
    ragged_batches,
    record_calls,
)
from tests.support.posteriors import fitted, make


def causal_model(kind: str) -> nn.Module:
    # Llama's attention is not for float64: its softmax of a masked row is NaN there.
    return (llama() if kind == "llama" else lora_model(kind)).eval()


def single_sequence_logits(model: nn.Module, batch: Mapping) -> torch.Tensor:
    """Brute force: each row alone, without padding, all of the vocabulary at all positions."""
    rows = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        logits = model(input_ids=ids[mask.bool()][None], use_cache=False).logits
        assert logits.shape[1:] == (mask.sum(), VOCABULARY)
        rows.append(logits[0, -1, CLASS_TOKEN_IDS])
    return torch.stack(rows)


def test_logits_of_a_bf16_model_are_those_of_the_model_in_float32():
    model = lora_model("gpt2", torch.bfloat16).eval()
    batch = ragged_batches(lengths=(5, 5))[0]
    logits = LogitsModel(model, CLASS_TOKEN_IDS)(batch)
    expected = model(input_ids=batch["input_ids"][:, :5]).logits[:, -1, CLASS_TOKEN_IDS]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected.float(), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("padded_to", [7, 12])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama"])
def test_logits_are_those_after_the_last_real_token_of_the_unpadded_sequence(kind, side, padded_to):
    model = causal_model(kind)
    (batch,) = ragged_batches(batch_size=8, padding_side=side, padded_to=padded_to)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if kind == "llama" else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(
        LogitsModel(model, CLASS_TOKEN_IDS)(batch),
        single_sequence_logits(model, batch),
        **tolerance,
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64, torch.int32, torch.uint8])
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_type_of_the_mask_does_not_matter(side, dtype):
    model = causal_model("gpt2")
    (batch,) = ragged_batches(batch_size=8, padding_side=side)
    expected = single_sequence_logits(model, batch)
    batch["attention_mask"] = batch["attention_mask"].to(dtype)
    torch.testing.assert_close(
        LogitsModel(model, CLASS_TOKEN_IDS)(batch), expected, rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox"])
def test_without_a_mask_the_last_token_is_the_last_position(kind):
    model = causal_model(kind)
    ids = ragged_batches(lengths=(6, 6, 6), padded_to=6)[0]["input_ids"]
    logits = LogitsModel(model, CLASS_TOKEN_IDS)({"input_ids": ids})
    expected = model(input_ids=ids).logits[:, -1, CLASS_TOKEN_IDS]
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


def test_input_embeddings_take_the_place_of_tokens():
    model = causal_model("gpt2")
    ids = ragged_batches(lengths=(6, 6, 6), padded_to=6)[0]["input_ids"]
    embeddings = model.get_input_embeddings()(ids).detach()
    logits = LogitsModel(model, CLASS_TOKEN_IDS)({"inputs_embeds": embeddings})
    expected = model(input_ids=ids).logits[:, -1, CLASS_TOKEN_IDS]
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


def test_a_tensor_of_tokens_gives_the_logits_of_the_mapping():
    model = causal_model("gpt2")
    ids = ragged_batches(lengths=(6, 6, 6), padded_to=6)[0]["input_ids"]
    adapted = LogitsModel(model, CLASS_TOKEN_IDS)
    assert torch.equal(adapted(ids), adapted({"input_ids": ids}))


def test_pairs_of_tokens_and_labels_fit_a_causal_language_model():
    la = make(lora_model("gpt2"), class_token_ids=CLASS_TOKEN_IDS)
    (batch,) = ragged_batches(lengths=(6, 6, 6), padded_to=6)
    la.fit([(batch["input_ids"], batch["labels"])])
    assert torch.isfinite(la.log_marginal_likelihood())


def test_positions_count_from_the_first_real_token_of_left_padding():
    model = causal_model("gpt2")
    calls = record_calls(model.base_model.model)
    (batch,) = ragged_batches(lengths=(2, 4), padded_to=4, padding_side="left")
    LogitsModel(model, CLASS_TOKEN_IDS)(batch)
    assert calls[-1]["position_ids"].tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]


def test_right_padding_needs_no_positions():
    model = causal_model("gpt2")
    calls = record_calls(model.base_model.model)
    LogitsModel(model, CLASS_TOKEN_IDS)(ragged_batches()[0])
    assert calls[0].get("position_ids") is None


def test_positions_that_the_batch_has_are_kept():
    model = causal_model("gpt2")
    calls = record_calls(model.base_model.model)
    (batch,) = ragged_batches(lengths=(2, 4), padded_to=4, padding_side="left")
    batch["position_ids"] = torch.tensor([[5, 5, 5, 6], [5, 6, 7, 8]])
    LogitsModel(model, CLASS_TOKEN_IDS)(batch)
    assert torch.equal(calls[0]["position_ids"], batch["position_ids"])


def test_no_cache_and_logits_of_one_position_alone_are_asked_for():
    model = causal_model("gpt2")
    calls = record_calls(model.base_model.model)
    outputs: list[Any] = []
    model.register_forward_hook(lambda *args: outputs.append(args[-1]))
    LogitsModel(model, CLASS_TOKEN_IDS)(ragged_batches()[0])
    assert calls[0]["use_cache"] is False
    assert outputs[0].past_key_values is None
    assert outputs[0].logits.shape == (3, 1, VOCABULARY)


class Decoder(nn.Module):
    """A user's wrapper that returns logits at all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = causal_model("gpt_neox")

    def forward(self, batch: Mapping) -> torch.Tensor:
        return self.inner(**batch).logits


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_users_wrapper_may_return_logits_at_all_positions(side):
    model = Decoder()
    (batch,) = ragged_batches(batch_size=8, padding_side=side)
    torch.testing.assert_close(
        LogitsModel(model, CLASS_TOKEN_IDS)(batch),
        single_sequence_logits(model.inner, batch),
        rtol=1e-9,
        atol=1e-9,
    )


class ImageFirst(nn.Module):
    """A user's wrapper that returns logits of an image's three positions as well."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, batch: Any) -> torch.Tensor:
        tokens = batch["input_ids"] if isinstance(batch, Mapping) else batch
        return nn.functional.pad(self.logits(tokens), (0, 0, 3, 0))


@pytest.mark.parametrize("as_batch", [dict, lambda batch: batch["input_ids"]])
def test_logits_at_other_positions_than_the_texts_are_refused(as_batch):
    batch = as_batch({"input_ids": torch.ones(2, 5, dtype=torch.long)})
    with pytest.raises(ValueError, match="logits at 8 positions for texts of 5"):
        LogitsModel(ImageFirst(), CLASS_TOKEN_IDS)(batch)


def test_a_decoder_that_reads_an_image_before_the_text_is_refused():
    model = image_first()
    (batch,) = ragged_batches(batch_size=8)
    assert torch.isfinite(LogitsModel(model, CLASS_TOKEN_IDS)(batch)).all()
    images = {"pixel_values": torch.randn(len(batch["input_ids"]), 3, 8, 8)}
    with pytest.raises(ValueError, match=r"logits at 12 positions for texts of 7"):
        LogitsModel(model, CLASS_TOKEN_IDS)(batch | images)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_decoder_that_is_not_apart_from_its_output_layer_works(monkeypatch):
    model, (batch,) = llama(), ragged_batches(batch_size=8)
    expected = LogitsModel(model, CLASS_TOKEN_IDS)(batch)
    monkeypatch.setattr(type(model), "base_model_prefix", "")
    assert torch.equal(LogitsModel(model, CLASS_TOKEN_IDS)(batch), expected)


def test_class_tokens_need_logits_at_positions(bert):
    with pytest.raises(ValueError, match=r"\(batch, positions, vocabulary\), not \(3, 3\)"):
        LogitsModel(bert, [1, 2])(ragged_batches()[0])
    deep = nn.Sequential(nn.Linear(4, 9), nn.Unflatten(1, (1, 1, 9)))
    with pytest.raises(ValueError, match=r"\(batch, positions, vocabulary\), not \(2, 1, 1, 9\)"):
        LogitsModel(deep, [1, 2])(torch.zeros(2, 4))


def test_a_causal_language_model_needs_class_token_ids():
    with pytest.raises(ValueError, match="pass class_token_ids"):
        make(lora_model("gpt2"))


def test_a_causal_language_model_with_injected_adapter_needs_class_token_ids():
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = inject_adapter_in_model(config, base_model("gpt2"))
    with pytest.raises(ValueError, match="pass class_token_ids"):
        LogitsModel(model)


@pytest.mark.parametrize("ids", [[3, 3], [1, 2, 1], [1], []], ids=str)
def test_class_tokens_must_be_two_or_more_and_distinct(ids):
    with pytest.raises(ValueError, match="two or more distinct tokens"):
        LogitsModel(lora_model("gpt2"), ids)


@pytest.mark.parametrize("ids", [[1, VOCABULARY], [-1, 2]], ids=str)
def test_class_tokens_must_be_in_the_vocabulary(ids):
    with pytest.raises(ValueError, match="not all in the model's vocabulary"):
        LogitsModel(lora_model("gpt2"), ids)


def test_the_first_and_the_last_token_of_the_vocabulary_may_be_classes():
    model, (batch, *_) = lora_model("gpt2").eval(), ragged_batches()
    ids = [0, VOCABULARY - 1]
    every = LogitsModel(model, list(range(VOCABULARY)))(batch)
    assert torch.equal(LogitsModel(model, ids)(batch), every[:, ids])


def t5() -> nn.Module:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=8,
        d_kv=4,
        d_ff=8,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config).double().eval()


def bart() -> nn.Module:
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=VOCABULARY,
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        max_position_embeddings=64,
        decoder_start_token_id=2,
    )
    return BartForConditionalGeneration(config).double().eval()


def encoder_decoder_logits(model: nn.Module, batch: Mapping, start: list[int]) -> torch.Tensor:
    """Brute force: each text alone, with what its decoder begins with."""
    rows = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        decoder = torch.tensor([start])
        logits = model(input_ids=ids[mask.bool()][None], decoder_input_ids=decoder).logits
        rows.append(logits[0, -1, CLASS_TOKEN_IDS])
    return torch.stack(rows)


@pytest.mark.parametrize(("make_model", "start"), [(t5, 0), (bart, 2)])
def test_an_encoder_decoder_answers_after_its_start_token(make_model, start):
    model = make_model()
    (batch,) = ragged_batches(batch_size=8)
    torch.testing.assert_close(
        LogitsModel(model, CLASS_TOKEN_IDS)(batch),
        encoder_decoder_logits(model, batch, [start]),
        rtol=1e-9,
        atol=1e-9,
    )


def test_an_encoder_decoder_answers_after_the_decoder_input_that_the_batch_gives():
    model = t5()
    (batch,) = ragged_batches(batch_size=8)
    batch["decoder_input_ids"] = torch.tensor([[0, 9, 4]]).expand(8, -1)
    torch.testing.assert_close(
        LogitsModel(model, CLASS_TOKEN_IDS)(batch),
        encoder_decoder_logits(model, batch, [0, 9, 4]),
        rtol=1e-9,
        atol=1e-9,
    )


def test_an_encoder_decoder_without_a_start_token_is_refused():
    model = t5()
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = None
    with pytest.raises(ValueError, match=r"no decoder_start_token_id.*decoder_input_ids"):
        LogitsModel(model, CLASS_TOKEN_IDS)(ragged_batches()[0])


MASK = 7


def masked_model() -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
    )
    return BertForMaskedLM(config).double().eval()


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_masked_language_model_answers_at_its_mask_token(side):
    model = masked_model()
    (batch,) = ragged_batches(batch_size=4, lengths=(7, 4, 5, 3), padding_side=side)
    ids, real = batch["input_ids"], batch["attention_mask"].bool()
    ids[ids == MASK] += 1
    places = real.int().argmax(-1) + torch.tensor([5, 1, 0, 2])
    ids[torch.arange(4), places] = MASK
    rows = []
    for row, mask in zip(ids, real, strict=True):
        logits = model(input_ids=row[mask][None]).logits[0]
        rows.append(logits[row[mask] == MASK][0, CLASS_TOKEN_IDS])
    adapted = LogitsModel(model, CLASS_TOKEN_IDS, mask_token_id=MASK)
    torch.testing.assert_close(adapted(batch), torch.stack(rows), rtol=1e-9, atol=1e-9)


def test_positions_are_those_of_the_tokens_whatever_the_mask():
    tokens = torch.tensor([[MASK + 1, MASK, 0]])
    inputs = {"input_ids": tokens, "attention_mask": torch.ones(1, 1, 3, 3)}
    logits = torch.randn(1, 3, VOCABULARY)
    found = AnswerTokens(CLASS_TOKEN_IDS, None, MASK).select(logits, inputs)
    assert torch.equal(found, logits[:, 1, CLASS_TOKEN_IDS])


def test_a_masked_language_model_needs_its_mask_token():
    with pytest.raises(ValueError, match=r"BertForMaskedLM.*mask_token_id"):
        LogitsModel(masked_model(), CLASS_TOKEN_IDS)


@pytest.mark.parametrize("n_masks", [0, 2])
def test_each_text_of_a_masked_language_model_has_one_mask_token(n_masks):
    (batch,) = ragged_batches(lengths=(7, 7), padded_to=7)
    batch["input_ids"][batch["input_ids"] == MASK] += 1
    batch["input_ids"][0, 0] = MASK
    batch["input_ids"][1, :n_masks] = MASK
    with pytest.raises(ValueError, match=rf"one mask token 7, but .* have \[1, {n_masks}\]"):
        LogitsModel(masked_model(), CLASS_TOKEN_IDS, mask_token_id=MASK)(batch)


def test_prompts_that_end_in_their_answers_are_warned_of():
    model = LogitsModel(causal_model("gpt2"), CLASS_TOKEN_IDS)
    (batch,) = ragged_batches(lengths=(4, 6, 7))
    batch["input_ids"][[0, 1], [3, 5]] = torch.tensor(CLASS_TOKEN_IDS[:2])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(batch)
    batch["input_ids"][2, 6] = CLASS_TOKEN_IDS[1]
    with pytest.warns(UserWarning, match="leave the answers out of the prompts"):
        model(batch)


@pytest.mark.parametrize("ids", [tuple(CLASS_TOKEN_IDS), torch.tensor(CLASS_TOKEN_IDS)], ids=type)
def test_class_tokens_may_be_any_sequence(ids):
    model = causal_model("gpt2")
    batch = ragged_batches()[0]
    assert torch.equal(LogitsModel(model, ids)(batch), LogitsModel(model, CLASS_TOKEN_IDS)(batch))


def test_classes_follow_the_order_of_the_class_tokens():
    model = causal_model("gpt2")
    batch = ragged_batches()[0]
    logits = LogitsModel(model, CLASS_TOKEN_IDS)(batch)
    assert torch.equal(LogitsModel(model, CLASS_TOKEN_IDS[::-1])(batch), logits.flip(-1))


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_vocabulary_is_scored_at_one_position_a_row(side):
    model = llama_with_output_layer()
    rows = []
    head = model.base_model.model.lm_head
    head.base_layer.register_forward_hook(lambda _, __, output: rows.append(output.shape))
    la = fitted("gpt2", model=model)
    batches = ragged_batches(padding_side=side)
    la.fit(batches)
    la(batches[0])
    la.predictive_statistics(batches)
    assert {shape[1:] for shape in rows} == {(1, VOCABULARY)}
