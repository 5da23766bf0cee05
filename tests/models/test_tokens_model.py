"""Logits of labelled tokens, whatever the padding, and what batches are refused."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from transformers import FSMTConfig, FSMTForConditionalGeneration

from laplace_lora_ext.models.tokens_model import TokensModel
from tests.support.models import VOCABULARY, lora_model, ragged_batches
from tests.support.texts import encoder_decoder, pairs_of_texts, text_batches, token_logits


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox"])
def test_logits_are_those_that_predict_labels_in_the_texts_alone(kind, side):
    model = lora_model(kind).eval()
    (batch,) = text_batches(batch_size=6, padding_side=side, padded_to=9)
    adapted = TokensModel(model)
    expected, _ = token_logits(model, [batch])
    assert_close(adapted(batch), expected, rtol=1e-9, atol=1e-9)
    targets = adapted.split(batch)[1]
    tokens = targets[targets != -100]
    assert tokens.tolist() == batch["labels"][batch["labels"] != -100].tolist()
    assert adapted.output_size == VOCABULARY
    assert torch.equal(adapted.labelled(batch), batch["labels"] != -100)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_texts_first_token_is_predicted_by_nothing_and_by_no_padding(side):
    model = lora_model("gpt2").eval()
    (batch,) = text_batches(batch_size=6, padding_side=side, padded_to=9)
    batch["labels"] = torch.where(batch["attention_mask"].bool(), batch["input_ids"], -100)
    adapted = TokensModel(model)
    found = adapted(batch)
    assert len(found) == batch["attention_mask"].sum() - 6 == adapted.labelled(batch).sum()
    assert_close(found, token_logits(model, [batch])[0], rtol=1e-9, atol=1e-9)


def test_a_gap_in_a_text_predicts_what_follows_as_in_training():
    model = lora_model("gpt_neox").eval()
    (batch,) = text_batches(batch_size=6)
    batch["attention_mask"][0, 3] = 0
    batch["labels"][0, 3] = -100
    adapted = TokensModel(model)
    loss = cross_entropy(adapted(batch), batch["labels"][batch["labels"] != -100])
    assert_close(loss, model(**batch).loss.to(loss))


def test_the_output_layer_runs_for_labelled_tokens_alone():
    model = lora_model("gpt2").eval()
    seen = []
    layer = model.get_output_embeddings()
    layer.register_forward_hook(lambda _, args, output: seen.append(output.shape[1]))
    (batch,) = text_batches(batch_size=6, padded_to=20)
    TokensModel(model)(batch)
    assert seen == [5]  # the longest text has seven tokens, of which two are its prompt
    assert len(layer._forward_pre_hooks) == 0


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_an_encoder_reads_left_and_right_padded_texts_alike(kind):
    labels = pairs_of_texts()["labels"]  # as many as positions
    ragged = [
        ragged_batches((4, 3, 2), padded_to=4, padding_side=side)[0] for side in ("left", "right")
    ]
    adapted = TokensModel(encoder_decoder(kind))
    assert_close(*(adapted(batch | {"labels": labels}) for batch in ragged))


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_labels_of_an_encoder_decoder_are_predicted_at_their_own_place(kind):
    model = encoder_decoder(kind)
    batch = pairs_of_texts()
    adapted = TokensModel(model)
    loss = cross_entropy(adapted(batch), batch["labels"][batch["labels"] != -100])
    assert_close(loss, model(**batch).loss.to(loss))
    model_of_collator = model.get_base_model()
    shifted = model_of_collator.prepare_decoder_input_ids_from_labels(batch["labels"])
    given = batch | {"decoder_input_ids": shifted}
    assert_close(adapted(given), adapted(batch))


def test_labels_anywhere_in_an_encoder_decoders_text_are_found():
    model = encoder_decoder("t5")
    batch = pairs_of_texts()
    batch["labels"] = torch.tensor([[5, 6, 7, 8], [-100, 9, -100, 4], [-100, -100, 3, 2]])
    shifted = model.get_base_model().prepare_decoder_input_ids_from_labels(batch["labels"])
    everything = model(**{**batch, "decoder_input_ids": shifted}).logits
    found = TokensModel(model)(batch)
    assert_close(found, everything[batch["labels"] != -100].to(found))


def test_what_a_decoder_reads_may_be_given_as_embeddings_or_left_open():
    model = encoder_decoder("t5")
    batch = pairs_of_texts()
    base = model.get_base_model()
    shifted = base.prepare_decoder_input_ids_from_labels(batch["labels"])
    embeddings = base.get_input_embeddings()(shifted)
    expected = TokensModel(model)(batch)
    for given in ({"decoder_input_ids": None}, {"decoder_inputs_embeds": embeddings}):
        assert_close(TokensModel(model)(batch | given), expected)


def test_an_encoder_decoder_may_have_no_method_that_shifts_labels(monkeypatch):
    model = encoder_decoder("bart")
    batch = pairs_of_texts()
    model.get_base_model().config.decoder_start_token_id = 2
    expected = TokensModel(model)(batch)
    monkeypatch.delattr(type(model.get_base_model()), "prepare_decoder_input_ids_from_labels")
    assert_close(TokensModel(model)(batch), expected, rtol=0, atol=0)


def test_an_embedding_that_is_also_the_output_layer_and_labels_that_a_model_writes_to():
    torch.manual_seed(0)
    sides = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24}
    sides |= {key.replace("encoder", "decoder"): n for key, n in sides.items()}
    tokens = {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY, "pad_token_id": 0}
    config = FSMTConfig(langs=["en", "de"], d_model=12, **sides, **tokens)
    model = FSMTForConditionalGeneration(config).eval()
    batch = pairs_of_texts()
    labels = batch["labels"].clone()
    found = TokensModel(model)(batch)
    assert torch.equal(batch["labels"], labels)
    batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch.pop("labels"))
    expected = model(**batch, use_cache=False).logits[labels != -100]
    assert_close(found, expected)


def changed(**parts):
    (batch,) = text_batches(batch_size=6)
    return batch | parts


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (changed(labels=torch.full((6, 7), -100)), "no token is labelled"),
        (changed(labels=torch.zeros(6, dtype=torch.long)), "tokens of shape"),
        (changed(labels=torch.zeros(6, 7)), "tokens of shape"),
        (
            changed(labels=torch.ones(6, 4, dtype=torch.long)),
            r"labels have shape \(6, 4\), but input_ids",
        ),
        (changed(labels=changed()["input_ids"]), "labels where attention_mask is 0"),
        (changed(attention_mask=torch.ones(6, 5)), r"attention_mask has \(6, 5\)"),
    ],
)
def test_what_is_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        TokensModel(lora_model("gpt2").eval())(batch)


def test_a_batch_without_labels_and_one_that_is_no_mapping_are_refused():
    model = TokensModel(lora_model("gpt2").eval())
    batch = changed()
    del batch["labels"]
    with pytest.raises(ValueError, match="No labels 'labels'"):
        model(batch)
    with pytest.raises(TypeError, match="be a mapping, not tuple"):
        model((batch, batch))


def test_models_that_write_no_text_are_refused():
    with pytest.raises(ValueError, match="generates text"):
        TokensModel(lora_model("bert"))
    with pytest.raises(ValueError, match="whole vocabulary"):
        TokensModel(lora_model("gpt2"), [1, 2])
    with pytest.raises(ValueError, match="whole vocabulary"):
        TokensModel(lora_model("gpt2"), mask_token_id=1)
