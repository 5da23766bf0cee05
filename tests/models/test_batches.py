"""Batches as people have them."""

from collections import UserDict
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from transformers import BatchEncoding

from laplace_lora_ext.models.batches import check_texts, positions_of, text_first
from laplace_lora_ext.models.logits_model import LogitsModel
from tests.support.models import (
    CLASS_TOKEN_IDS,
    lora_model,
    part_of,
    ragged_batches,
    record_calls,
)
from tests.support.posteriors import fitted

PAD = 3

Batch = dict[str, Any]


def adapted(kind: str) -> LogitsModel:
    """Adapt a model whose configuration names a padding token."""
    model = lora_model(kind).eval()
    model.config.pad_token_id = PAD
    return LogitsModel(model, CLASS_TOKEN_IDS if kind == "gpt2" else None)


def padded_batch(side: str = "right") -> Batch:
    """Make a batch with its mask, whose texts don't hold the padding token."""
    (batch,) = ragged_batches(lengths=(4, 7, 5), padding_side=side)
    ids = batch["input_ids"]
    ids[ids == PAD] += 1
    ids[batch["attention_mask"] == 0] = PAD
    return batch


def without(batch: Mapping[str, Any], left_out: str) -> Batch:
    """Copy a batch without one of its keys."""
    return {key: value for key, value in batch.items() if key != left_out}


# --- mappings, labels that are none ---------------------------------------------------


@pytest.mark.parametrize("as_given", [UserDict, BatchEncoding, MappingProxyType])
def test_every_mapping_fits_and_predicts_the_same(bert, batch, as_given):
    given = as_given(batch)
    la = fitted(model=bert, batches=[given])
    expected = fitted(model=bert, batches=[batch])
    assert torch.equal(la.loss, expected.loss)
    # A posterior takes them with their labels, and takes nothing out of them.
    assert torch.equal(la(given), expected(batch))
    assert list(given) == list(batch)


def test_labels_that_are_none_are_not_asked_for_by_predictions_alone(la, batch):
    expected = la.predict_proba(batch)
    inputs, none = without(batch, "labels"), batch | {"labels": None}
    message = r"batch 1: No labels .*\['attention_mask', 'input_ids'\].*dict_key_y"
    # As loaders of texts to predict make them.
    for unlabelled in (none, (inputs, None)):
        assert (la.predict_proba([unlabelled]) == expected).all()
        assert la.predictive_statistics([unlabelled]).targets is None
        with pytest.raises(ValueError, match=message):
            la.fit([batch, unlabelled])
    assert (la.predict_proba(none) == expected).all()
    with pytest.raises(ValueError, match=r"No labels .*only Tensor"):
        la.model.split((batch["input_ids"], None))
    with pytest.raises(TypeError, match=r"must be numbers.*'air'"):
        la.fit([(batch, ["air", "plant", "air"])])


# --- texts that a model would read in another way -------------------------------------


@pytest.mark.parametrize(("kind", "side"), [("bert", "right"), ("gpt2", "left")])
def test_what_a_model_would_read_in_another_way_is_refused(kind, side):
    model = adapted(kind)
    batch = padded_batch(side)
    ids = batch["input_ids"]
    empty = batch["attention_mask"].clone()
    empty[1] = 0
    for given, message in (
        (without(batch, "attention_mask"), "no attention_mask, but .* token 3"),
        (ids, "attention_mask"),
        (batch | {"attention_mask": empty}, "Row 1 has no text"),
        (ids[:, :0], "Row 0 has no text"),
    ):
        with pytest.raises(ValueError, match=message):
            model(given)
    # One of two texts of an example.
    of_pairs = {
        "input_ids": ids[:, None].expand(-1, 2, -1),
        "attention_mask": torch.stack([torch.ones_like(empty), empty], dim=1),
    }
    with pytest.raises(ValueError, match="Row 1 has no text"):
        check_texts(of_pairs, model.transformer)


def test_padding_tokens_inside_of_texts_harm_nothing():
    model = adapted("gpt2")
    batch = padded_batch()
    batch["input_ids"][1, 2] = PAD
    whole = part_of(batch, slice(1, 2))
    assert torch.equal(model(without(whole, "attention_mask")), model(whole))
    # Nor at ends, where positions say what is a text.
    ids = torch.tensor([[5, PAD, 7, PAD]])
    packed = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 0, 1]])}
    assert model(packed).shape == (1, len(CLASS_TOKEN_IDS))


# --- rows of a batch ------------------------------------------------------------------


positions = partial(positions_of, device=torch.device("cpu"))


def test_positions_know_what_is_beside_texts():
    ids = torch.ones(4, 3).long()
    assert positions(ids, 4).is_text
    # What all texts share is no other content of theirs.
    shared = {"input_ids": ids, "position_ids": torch.arange(3)[None]}
    assert positions(shared, 4).is_text
    # Features, or parts of which texts have other numbers.
    for beside in (torch.ones(4, 2), ids[:2]):
        assert not positions({"input_ids": ids, "beside": beside}, 4).is_text
    # Windows.
    assert positions(ids, 3).n_tokens is None
    # Two texts of an example, of which a pooler makes a row each.
    padded = {"input_ids": ids, "attention_mask": ids.tril()}
    assert positions(padded, 2).valid(2) is None


def test_padding_on_the_left_moves_behind_the_text_with_all_that_lies_by_position():
    batch = padded_batch("left")
    mask = batch["attention_mask"]
    types = torch.arange(7).expand(3, 7)
    # Of these both have a number for each place by chance.
    others = {"decoder_x": types, "pixel_values": torch.randn(3, 7, 2)}
    of_tokens = {"token_type_ids": types, "inputs_embeds": types[..., None] / 2}
    moved = text_first(batch | of_tokens | others)
    # Of ones behind zeros, the mirror image has the ones first.
    assert torch.equal(moved["attention_mask"], mask.flip(1))
    found = moved["token_type_ids"][mask.flip(1).bool()]
    assert torch.equal(found, types[mask.bool()])
    assert torch.equal(2 * moved["inputs_embeds"][..., 0], moved["token_type_ids"])
    for key, value in others.items():
        assert moved[key] is value

    # How a classifier pools is its own, and given positions stay where they are.
    positions = {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    for kind, given in (("bert", batch), ("gpt2", batch | positions)):
        model = adapted(kind)
        calls = record_calls(model.model.base_model.model)
        model(given)
        assert torch.equal(calls[0]["attention_mask"], mask)


def test_a_mask_of_pairs_of_tokens_does_not_count_as_a_row_for_each_query():
    features = {"features": torch.ones(2, 5, 3)}
    of_pairs = features | {"attention_mask": torch.ones(2, 1, 5, 5)}
    found = positions(of_pairs, 2)
    assert (found.n_rows, found.n_tokens) == (2, None)
    # It is kept, for what it can't be applied to is refused.
    assert found.mask is not None
    of_tokens = features | {"attention_mask": torch.ones(2, 5)}
    assert positions(of_tokens, 2).n_tokens == 10
