"""Logits of labelled tokens, whatever the padding, and what batches are refused."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

import tests.support.dense as dense
from laplace_lora_ext.models.tokens_model import TokensModel
from tests.support.models import (
    VOCABULARY,
    lora_model,
)
from tests.support.texts import encoder_decoder, pairs_of_texts, text_batches


def expected_logits(model, batch):
    """Brute force: each text alone, without padding, and all of its logits."""
    rows = []
    for row in range(len(batch["labels"])):
        inputs = dense.unpadded(batch, row)
        labels = batch["labels"][row][batch["attention_mask"][row].bool()]
        logits = model(**inputs, use_cache=False).logits[0]
        rows.append(logits[:-1][labels[1:] != -100])
    return torch.cat(rows)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox"])
def test_logits_are_those_that_predict_labels_in_the_texts_alone(kind, side):
    model = lora_model(kind).eval()
    (batch,) = text_batches(batch_size=6, padding_side=side, padded_to=9)
    adapted = TokensModel(model)
    torch.testing.assert_close(adapted(batch), expected_logits(model, batch), rtol=1e-9, atol=1e-9)
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
    torch.testing.assert_close(found, expected_logits(model, batch), rtol=1e-9, atol=1e-9)


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
def test_labels_of_an_encoder_decoder_are_predicted_at_their_own_place(kind):
    model, batch = encoder_decoder(kind), pairs_of_texts()
    adapted = TokensModel(model)
    loss = cross_entropy(adapted(batch), batch["labels"][batch["labels"] != -100])
    torch.testing.assert_close(loss, model(**batch).loss.to(loss))
    model_of_collator = model.get_base_model()
    shifted = model_of_collator.prepare_decoder_input_ids_from_labels(batch["labels"])
    given = batch | {"decoder_input_ids": shifted}
    torch.testing.assert_close(adapted(given), adapted(batch))


def test_labels_anywhere_in_an_encoder_decoders_text_are_found():
    model, batch = encoder_decoder("t5"), pairs_of_texts()
    batch["labels"] = torch.tensor([[5, 6, 7, 8], [-100, 9, -100, 4], [-100, -100, 3, 2]])
    shifted = model.get_base_model().prepare_decoder_input_ids_from_labels(batch["labels"])
    everything = model(**{**batch, "decoder_input_ids": shifted}).logits
    found = TokensModel(model)(batch)
    torch.testing.assert_close(found, everything[batch["labels"] != -100].to(found))


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
