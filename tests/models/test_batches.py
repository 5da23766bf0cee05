"""Batches as people have them."""

from collections import UserDict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.testing import assert_close
from transformers import (
    BatchEncoding,
    LongformerConfig,
    LongformerForSequenceClassification,
)

from laplace_lora_ext.models.batches import check_texts, named_batches, text_first
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.tokens_model import TokensModel
from tests.support.dense import EXACT
from tests.support.models import (
    CLASS_TOKEN_IDS,
    VOCABULARY,
    lora_model,
    plain_model,
    ragged_batches,
    record_calls,
)
from tests.support.posteriors import STRUCTURES, fitted, make

PAD = 3


def adapted(
    kind: str,
    pad: int | None = PAD,
) -> LogitsModel:
    """Adapt a model whose configuration names a padding token, or none."""
    model = lora_model(kind).eval()
    model.config.pad_token_id = pad
    if kind == "bert":
        return LogitsModel(model)
    return LogitsModel(model, CLASS_TOKEN_IDS)


def padded_batch(side: str = "right") -> dict[str, torch.Tensor]:
    """Make a batch with its mask, whose texts don't hold the padding token."""
    (batch,) = ragged_batches(
        lengths=(4, 7, 5),
        padding_side=side,
    )
    ids = batch["input_ids"]
    ids[ids == PAD] += 1
    ids[batch["attention_mask"] == 0] = PAD
    return batch


def without(
    batch: Mapping[str, Any],
    left_out: str,
) -> dict[str, Any]:
    """Copy a batch without one of its keys."""
    return {key: value for key, value in batch.items() if key != left_out}


# --- mappings, pairs and keywords -----------------------------------------------------


def read_only(batch: dict[str, Any]) -> MappingProxyType:
    return MappingProxyType(dict(batch))


@pytest.mark.parametrize("mapping", [dict, UserDict, BatchEncoding, read_only])
def test_every_mapping_and_a_pair_give_the_same_and_are_left_as_they_were(
    bert, mapping
):
    batches = ragged_batches()
    expected = make(bert)
    expected.fit(batches)
    evidence = expected.log_marginal_likelihood()

    wrapped = [mapping(batch) for batch in batches]
    first = wrapped[0]
    before = dict(first)
    of_mappings = make(bert)
    of_mappings.fit(wrapped)
    assert torch.equal(of_mappings.log_marginal_likelihood(), evidence)
    logits = bert(**without(batches[0], "labels")).logits
    assert torch.equal(of_mappings.model(first), logits)
    assert dict(first) == before  # the same tensor objects

    pairs = [(without(batch, "labels"), batch["labels"]) for batch in batches]
    of_pairs = make(bert)
    of_pairs.fit(pairs)
    assert torch.equal(of_pairs.log_marginal_likelihood(), evidence)


@pytest.mark.parametrize("mapping", [dict, BatchEncoding])
def test_a_users_module_gets_the_mapping_without_labels_as_it_is(mapping):
    taken = []

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = plain_model()

        def forward(self, batch: Mapping) -> torch.Tensor:
            taken.append(batch)
            return self.inner(batch["x"])

    batch = {
        "x": torch.randn(2, 5).double(),
        "labels": torch.ones(2),
        "lengths": [3, 4],
    }
    LogitsModel(Wrapper())(mapping(batch))
    assert [type(each) for each in taken] == [mapping]
    assert list(taken[0]) == ["x", "lengths"]


class Answering(nn.Module):
    """A user's wrapper, which reads the answers itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def answers(self, **inputs: torch.Tensor) -> torch.Tensor:
        logits = self.model(**inputs).logits
        last = inputs["attention_mask"].sum(-1) - 1
        return logits[torch.arange(len(last)), last][:, CLASS_TOKEN_IDS]


class OfKeywords(Answering):
    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.answers(**inputs)


class OfKeywordsAlone(Answering):
    def forward(
        self,
        *,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
    ) -> torch.Tensor:
        return self.answers(input_ids=input_ids, attention_mask=attention_mask)


class OfNamedInputs(Answering):
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert attention_mask is not None
        return self.answers(input_ids=input_ids, attention_mask=attention_mask)


@pytest.mark.parametrize("wrapper", [OfKeywords, OfKeywordsAlone, OfNamedInputs])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_wrapper_whose_forward_takes_keywords_gives_what_class_tokens_give(
    structure, wrapper
):
    model = lora_model("gpt2").eval()
    batches = ragged_batches()
    expected = make(model, structure, class_token_ids=CLASS_TOKEN_IDS)
    expected.fit(batches)
    found = make(wrapper(model), structure)
    found.fit(batches)
    evidence = expected.log_marginal_likelihood()
    assert_close(found.log_marginal_likelihood(), evidence, **EXACT)
    assert_close(found(batches[0]), expected(batches[0]), **EXACT)


class Pooling(nn.Module):
    """Takes tokens by keyword alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 5)
        self.layer = nn.Linear(5, 3)

    def forward(self, *, input_ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.embedding(input_ids).mean(1))


@pytest.mark.parametrize("labels", [None, torch.tensor([0, 2])])
def test_keywords_reach_a_wrapper_within_pefts(labels):
    """And tokens by themselves, which have no other place there."""
    plain = Pooling()
    model = LogitsModel(get_peft_model(plain, LoraConfig(target_modules=["layer"])))
    tokens = torch.tensor([[1, 2], [3, 4]])
    expected = plain(input_ids=tokens)
    assert torch.equal(model({"input_ids": tokens, "labels": labels}), expected)
    assert torch.equal(model(tokens), expected)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_model_may_be_called_as_transformers_models_are(kind):
    model = adapted(kind)
    batch, *_ = ragged_batches()
    assert torch.equal(model(**batch), model(batch))


# --- labels that are none, batches that are empty -------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_labels_that_are_none_are_no_labels(structure):
    la = fitted(structure=structure)
    batch, *_ = ragged_batches()
    inputs = without(batch, "labels")
    unlabelled = batch | {"labels": None}
    assert torch.equal(la(unlabelled), la(batch))
    expected = la.predict_proba(batch)
    assert (la.predict_proba(unlabelled) == expected).all()
    for given in (unlabelled, (inputs, None), [inputs, None]):
        assert (la.predict_proba([given]) == expected).all()
        if structure == "lowrank_kron":
            assert la.predictive_statistics([given]).targets is None


@pytest.mark.parametrize("structure", STRUCTURES)
def test_empty_batches_are_left_out(structure):
    batches = ragged_batches()
    empty = {key: value[:0] for key, value in batches[0].items()}
    la = fitted(batches=batches, structure=structure)
    evidence = la.log_marginal_likelihood()
    la.fit([empty, *batches, empty])
    assert torch.equal(la.log_marginal_likelihood(), evidence)


def test_batches_keep_their_numbers_where_empty_ones_are_left_out():
    X = torch.randn(2, 3)
    none = X[:0]
    loader = [
        (X, X),
        (none, none),
        none,
        {"x": none, "y": 3},
        {"x": [1]},
        ({"x": X}, X),
    ]
    names = [name for name, _ in named_batches(loader)]
    assert names == ["batch 0", "batch 4", "batch 5"]


# --- several texts in a row -----------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_labels_that_are_none_fit_nothing(structure):
    la = make(lora_model("bert"), structure)
    batch, *_ = ragged_batches()
    inputs = without(batch, "labels")
    message = r"batch 1: No labels .*\['attention_mask', 'input_"
    for given in (batch | {"labels": None}, (inputs, None)):
        with pytest.raises(ValueError, match=message):
            la.fit([batch, given])
    with pytest.raises(TypeError, match="not Tensor without labels"):
        la.model.split((inputs["input_ids"], None))


RESTARTING = torch.tensor([0, 1, 2, 3, 0, 1, 2])
IN_ORDER = torch.arange(7)


ENDS = torch.tensor([0, 3, 7, 14, 21]).int()  # two texts in the first of three rows


SHOWING_SEVERAL_TEXTS = [
    pytest.param("position_ids", RESTARTING.expand(3, 7), id="position_ids"),
    pytest.param("position_ids", RESTARTING[None], id="position_ids of all rows"),
    pytest.param(
        "position_ids",
        torch.stack([RESTARTING, IN_ORDER, IN_ORDER, IN_ORDER])[:, None],
        id="position_ids of text and images",
    ),
    pytest.param(
        "position_ids",
        RESTARTING.expand(3, 3, 7),
        id="position_ids of three axes",
    ),
    pytest.param(
        "attention_mask",
        torch.tensor([1, 1, 1, 2, 2, 3, 3]).expand(3, 7),
        id="attention_mask",
    ),
    pytest.param(
        "attention_mask",
        torch.tensor([1.0, 1, 1, 2, 2, 0, 0]).expand(3, 7),
        id="attention_mask of floats",
    ),
    pytest.param(
        "seq_idx",
        torch.tensor([[0, 0, 0, 1, 1, 1, 2]]).int(),
        id="seq_idx",
    ),
    pytest.param("cu_seq_lens_q", ENDS, id="cu_seq_lens_q"),
    pytest.param("cu_seq_lens_k", ENDS, id="cu_seq_lens_k"),
]


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
@pytest.mark.parametrize(("key", "numbers"), SHOWING_SEVERAL_TEXTS)
def test_several_texts_in_a_row_are_refused_by_what_shows_them(key, numbers, kind):
    (batch,) = ragged_batches(lengths=(7, 7, 7))
    model = adapted(kind, pad=None)
    message = f"as {key} shows: give each text a row of its"
    with pytest.raises(NotImplementedError, match=message):
        model(batch | {key: numbers})
    embedded = without(batch, "input_ids")
    embedded["inputs_embeds"] = torch.randn(3, 7, 12).double()
    with pytest.raises(NotImplementedError, match=f"as {key} shows"):
        model(embedded | {key: numbers})


# As transformers' `DataCollatorWithFlattening` makes them.
@pytest.mark.parametrize(
    ("key", "of_two", "of_one"),
    [
        ("position_ids", [[0, 1, 2, 0, 1]], [[0, 1, 2, 3, 4]]),
        ("seq_idx", [[0, 0, 0, 1, 1]], [[0, 0, 0, 0, 0]]),
        ("cu_seq_lens_q", [0, 3, 5], [0, 5]),
        ("cu_seq_lens_k", [0, 3, 5], [0, 5]),
    ],
)
def test_packed_texts_of_supervised_fine_tuning_are_refused_and_one_text_is_not(
    key, of_two, of_one
):
    model = TokensModel(lora_model("gpt2").eval())
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    whole = {"input_ids": tokens, key: torch.tensor(of_one)}
    check_texts(whole, model.transformer)
    packed = {"input_ids": tokens, "labels": tokens, key: torch.tensor(of_two)}
    with pytest.raises(NotImplementedError, match=f"as {key} shows"):
        model(packed)


# --- texts that a model would read in another way -------------------------------------


def packed_with_a_mask_of_ones(
    batch: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    return batch | {
        "position_ids": RESTARTING.expand(3, 7),
        "attention_mask": torch.ones(3, 7),
    }


def without_a_mask(
    batch: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    return without(batch, "attention_mask")


def tokens_alone(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return batch["input_ids"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (packed_with_a_mask_of_ones, "as position_ids shows"),
        (without_a_mask, "no attention_mask, but the padding token 3"),
        (tokens_alone, "pass the tokenizer's attention_mask"),
    ],
)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_what_a_model_would_read_in_another_way_is_refused(kind, side, change, message):
    model = adapted(kind)
    batch = change(padded_batch(side))
    with pytest.raises((ValueError, NotImplementedError), match=message):
        model(batch)


def test_positions_that_restart_in_the_padding_are_not_refused():
    mask = torch.tensor([1, 1, 1, 1, 0, 0, 0])
    batch = padded_batch()
    batch["position_ids"] = RESTARTING.expand(3, 7)
    batch["attention_mask"] = mask.expand(3, 7)
    adapted("gpt2")(batch)


def test_one_text_a_row_is_not_refused():
    batch = padded_batch()
    batch["cu_seq_lens_q"] = torch.tensor([0, 7, 14, 21])
    batch["seq_idx"] = torch.zeros(3, 7)
    check_texts(batch, adapted("gpt2").transformer)


def test_positions_of_an_image_are_not_refused():
    axes = IN_ORDER.repeat(4, 3, 1)
    axes[2] = torch.tensor([0, 1, 2, 1, 2, 3, 4])  # columns of an image
    batch = padded_batch() | {"position_ids": axes}
    check_texts(batch, adapted("gpt2").transformer)


def test_longformers_tokens_of_global_attention_are_not_refused():
    config = LongformerConfig(
        vocab_size=VOCABULARY,
        hidden_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = LongformerForSequenceClassification(config)
    mask = torch.tensor([[2, 1, 1, 1, 1, 0, 0]])
    batch = padded_batch() | {"attention_mask": mask}
    check_texts(batch, model)


def test_a_padding_token_inside_of_a_text_is_not_refused():
    model = adapted("gpt2")
    (batch,) = ragged_batches(lengths=(7, 7))
    ids = batch["input_ids"]
    ids[ids == PAD] += 1
    ids[0, 2] = PAD
    assert torch.equal(model({"input_ids": ids}), model(batch))


# --- padding on the left --------------------------------------------------------------


def test_what_lies_by_position_comes_with_its_tokens_and_nothing_else_does():
    (batch,) = ragged_batches(lengths=(4, 7, 5), padding_side="left")
    mask = batch["attention_mask"]
    types = IN_ORDER.expand(3, 7)
    features = torch.randn(3, 7, 2)
    more = {"token_type_ids": types, "decoder_x": types, "pixel_values": features}
    moved = text_first(batch | more)
    # Of ones behind zeros, the mirror image has the ones first.
    expected_mask = mask.flip(1)
    assert torch.equal(moved["attention_mask"], expected_mask)
    of_texts = moved["token_type_ids"][expected_mask.bool()]
    assert torch.equal(of_texts, types[mask.bool()])
    assert moved["decoder_x"] is types
    assert moved["pixel_values"] is features


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_classifier_and_a_model_with_positions_read_texts_where_they_stand(kind):
    """How a classifier pools is its own, and given positions stay."""
    (batch,) = ragged_batches(lengths=(4, 7, 5), padding_side="left")
    mask = batch["attention_mask"]
    if kind == "gpt2":
        running = mask.cumsum(1) - 1
        batch["position_ids"] = running.clamp_min(0)
    model = adapted(kind)
    calls = record_calls(model.model.base_model.model)
    model(batch)
    assert torch.equal(calls[-1]["attention_mask"], mask)
