"""Logits of labelled tokens, whatever the padding, and what batches are refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from transformers import FSMTConfig, FSMTForConditionalGeneration

from laplace_lora_ext.tasks.language import TokensModel
from tests.support.models import VOCABULARY, lora_model, ragged_batches
from tests.support.texts import (
    LENGTHS,
    PROMPT,
    encoder_decoder,
    pairs_of_texts,
    text_batches,
    token_logits,
)

# Of texts that are padded and texts that are not, in float64.
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
NO_LABEL = -100

Batch = dict[str, Any]


@pytest.fixture
def adapted(gpt2: nn.Module) -> TokensModel:
    """GPT-2, whose logits are those of labelled tokens."""
    return TokensModel(gpt2)


# --- decoders -------------------------------------------------------------------------


def six_texts(**changes: Tensor) -> Batch:
    """Make a batch of six texts of seven positions, some of its columns replaced."""
    (batch,) = text_batches(batch_size=6)
    return batch | changes


def padded_texts(side: str) -> Batch:
    """Make a batch of all texts, with two positions more than the longest has."""
    (batch,) = text_batches(batch_size=6, padding_side=side, padded_to=9)
    return batch


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox"])
def test_logits_are_those_that_predict_labels_in_the_texts_alone(kind, side):
    model = lora_model(kind).eval()
    batch = padded_texts(side)
    adapted = TokensModel(model)
    expected, _ = token_logits(model, [batch])
    assert_close(adapted(batch), expected, **CLOSE)
    assert adapted.output_size == VOCABULARY


@pytest.mark.parametrize("side", ["left", "right"])
def test_targets_are_the_labels_of_the_texts_in_their_order(gpt2, adapted, side):
    batch = padded_texts(side)
    _, of_texts = token_logits(gpt2, [batch])
    is_labelled = batch["labels"] != NO_LABEL
    assert torch.equal(adapted.labelled(batch), is_labelled)
    assert torch.equal(batch["labels"][is_labelled], of_texts)
    _, targets = adapted.split(batch)
    assert torch.equal(targets[targets != NO_LABEL], of_texts)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_texts_first_token_is_predicted_by_nothing_and_by_no_padding(
    gpt2, adapted, side
):
    batch = padded_texts(side)
    is_real = batch["attention_mask"].bool()
    batch["labels"] = batch["input_ids"].masked_fill(~is_real, NO_LABEL)
    expected, _ = token_logits(gpt2, [batch])
    n_texts = len(LENGTHS)
    n_predicted = is_real.sum() - n_texts
    assert len(expected) == n_predicted
    assert adapted.labelled(batch).sum() == n_predicted
    assert_close(adapted(batch), expected, **CLOSE)


def assert_has_the_loss_of_training(model: nn.Module, batch: Batch) -> None:
    """Compare with the loss that the model itself makes of the labels."""
    is_labelled = batch["labels"] != NO_LABEL
    tokens = batch["labels"][is_labelled]
    logits = TokensModel(model)(batch)
    found = cross_entropy(logits, tokens)
    expected = model(**batch).loss
    assert_close(found, expected.to(found))


def test_a_gap_in_a_text_predicts_what_follows_as_in_training():
    model = lora_model("gpt_neox").eval()
    batch = six_texts()
    batch["attention_mask"][0, 3] = 0
    batch["labels"][0, 3] = NO_LABEL
    assert_has_the_loss_of_training(model, batch)


def test_the_output_layer_runs_for_labelled_tokens_alone(gpt2, adapted):
    n_positions = []

    def note(layer: nn.Module, args: Any, output: Tensor) -> None:
        n_positions.append(output.shape[1])

    layer = gpt2.get_output_embeddings()
    layer.register_forward_hook(note)
    (batch,) = text_batches(batch_size=6, padded_to=20)
    adapted(batch)
    # Of the longest text, and not of the padding.
    assert n_positions == [max(LENGTHS) - PROMPT]
    # The hook that picks them is gone.
    assert not layer._forward_pre_hooks


# --- encoder-decoders -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_an_encoder_reads_left_and_right_padded_texts_alike(kind):
    # As many labels as positions.
    labels = pairs_of_texts()["labels"]
    adapted = TokensModel(encoder_decoder(kind))
    logits = {}
    for side in ("left", "right"):
        (texts,) = ragged_batches(lengths=(4, 3, 2), padded_to=4, padding_side=side)
        logits[side] = adapted(texts | {"labels": labels})
    assert_close(logits["left"], logits["right"])


def shifted(model: nn.Module, labels: Tensor) -> Tensor:
    """Make what the decoder reads, as collators do that are given the model."""
    return model.get_base_model().prepare_decoder_input_ids_from_labels(labels)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_labels_of_an_encoder_decoder_are_predicted_at_their_own_place(kind):
    model = encoder_decoder(kind)
    batch = pairs_of_texts()
    assert_has_the_loss_of_training(model, batch)
    adapted = TokensModel(model)
    expected = adapted(batch)
    # What a decoder reads may be said by a collator, left open, or given as embeddings.
    tokens = shifted(model, batch["labels"])
    assert_close(adapted(batch | {"decoder_input_ids": tokens}), expected)
    assert_close(adapted(batch | {"decoder_input_ids": None}), expected)
    if kind == "t5":
        embeddings = model.get_input_embeddings()(tokens)
        found = adapted(batch | {"decoder_inputs_embeds": embeddings})
        assert_close(found, expected)


def test_labels_anywhere_in_an_encoder_decoders_text_are_found():
    model = encoder_decoder("t5")
    labels = torch.tensor(
        [[5, 6, 7, 8], [NO_LABEL, 9, NO_LABEL, 4], [NO_LABEL, NO_LABEL, 3, 2]]
    )
    batch = pairs_of_texts() | {"labels": labels}
    tokens = shifted(model, labels)
    output = model(**batch, decoder_input_ids=tokens)
    expected = output.logits[labels != NO_LABEL]
    found = TokensModel(model)(batch)
    assert_close(found, expected.to(found))


def test_an_encoder_decoder_may_have_no_method_that_shifts_labels(monkeypatch):
    model = encoder_decoder("bart")
    base = model.get_base_model()
    # Then the configuration is all that says what a decoder begins with.
    base.config.decoder_start_token_id = 2
    batch = pairs_of_texts()
    expected = TokensModel(model)(batch)
    monkeypatch.delattr(type(base), "prepare_decoder_input_ids_from_labels")
    assert_close(TokensModel(model)(batch), expected, rtol=0, atol=0)


@pytest.fixture
def fsmt() -> nn.Module:
    """A model whose embedding is also its output layer, and which writes to labels."""
    torch.manual_seed(0)
    config = FSMTConfig(
        langs=["en", "de"],
        src_vocab_size=VOCABULARY,
        tgt_vocab_size=VOCABULARY,
        pad_token_id=0,
        d_model=12,
        encoder_layers=1,
        encoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=24,
    )
    return FSMTForConditionalGeneration(config).eval()


def test_an_embedding_that_is_also_the_output_layer(fsmt):
    batch = pairs_of_texts()
    labels = batch["labels"].clone()
    found = TokensModel(fsmt)(batch)
    # The model writes to what it is given.
    assert torch.equal(batch.pop("labels"), labels)
    tokens = fsmt.prepare_decoder_input_ids_from_labels(labels.clone())
    output = fsmt(**batch, decoder_input_ids=tokens, use_cache=False)
    assert_close(found, output.logits[labels != NO_LABEL])


# --- refused --------------------------------------------------------------------------


NOTHING = torch.full((6, 7), NO_LABEL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": NOTHING}, "no token is labelled"),
        ({"labels": torch.zeros(6, dtype=torch.long)}, "whole numbers"),
        ({"labels": torch.zeros(6, 7)}, "whole numbers"),
        ({"labels": torch.ones(6, 4, dtype=torch.long)}, "input_ids has"),
        ({"labels": six_texts()["input_ids"]}, "attention_mask is 0"),
        ({"attention_mask": torch.ones(6, 5)}, "attention_mask has"),
        ({"labels": None}, "No labels 'labels'"),
    ],
)
def test_labels_that_do_not_fit_are_refused(adapted, changes, message):
    batch = six_texts(**changes)
    with pytest.raises(ValueError, match=message):
        adapted(batch)
    with pytest.raises(TypeError, match="mapping"):
        adapted((batch, batch))


@pytest.mark.parametrize(
    ("kind", "keywords", "message"),
    [
        ("bert", {}, "generates text"),
        ("gpt2", {"class_token_ids": [1, 2]}, "whole vocabulary"),
        ("gpt2", {"mask_token_id": 1}, "whole vocabulary"),
    ],
)
def test_models_that_do_not_fit_are_refused(kind, keywords, message):
    with pytest.raises(ValueError, match=message):
        TokensModel(lora_model(kind), **keywords)
