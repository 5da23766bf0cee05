"""Batches as people have them."""

from collections import UserDict
from collections.abc import Mapping
from types import MappingProxyType

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


def adapted(kind: str, pad: int | None = PAD) -> LogitsModel:
    model = lora_model(kind)
    model.config.pad_token_id = pad
    return LogitsModel(model.eval(), None if kind == "bert" else CLASS_TOKEN_IDS)


def padded_batch(side: str = "right") -> dict[str, torch.Tensor]:
    """A batch with its mask, whose texts don't hold the padding token."""
    (batch,) = ragged_batches(lengths=(4, 7, 5), padding_side=side)
    ids = batch["input_ids"]
    ids[ids == PAD] += 1
    ids[batch["attention_mask"] == 0] = PAD
    return batch


MAPPINGS = [dict, UserDict, BatchEncoding, lambda d: MappingProxyType(dict(d))]


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_every_mapping_and_a_pair_give_the_same_and_are_left_as_they_were(bert, mapping):
    batches = ragged_batches()
    wrapped = [mapping(batch) for batch in batches]
    inputs = [{k: v for k, v in batch.items() if k != "labels"} for batch in batches]
    before = dict(wrapped[0])
    expected = make(bert)
    found = make(bert)
    of_pairs = make(bert)
    expected.fit(batches)
    found.fit(wrapped)
    of_pairs.fit([(x, batch["labels"]) for x, batch in zip(inputs, batches, strict=True)])
    assert torch.equal(found.log_marginal_likelihood(), expected.log_marginal_likelihood())
    assert torch.equal(of_pairs.log_marginal_likelihood(), expected.log_marginal_likelihood())
    assert torch.equal(found.model(wrapped[0]), bert(**inputs[0]).logits)
    assert dict(wrapped[0]) == before  # the same tensor objects


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

    x = torch.randn(2, 5).double()
    labels = torch.ones(2)
    LogitsModel(Wrapper())(mapping({"x": x, "labels": labels, "lengths": [3, 4]}))
    assert [type(batch) for batch in taken] == [mapping]
    assert list(taken[0]) == ["x", "lengths"]


class Answering(nn.Module):
    """A user's wrapper, which reads the answers itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def answers(self, **inputs: torch.Tensor) -> torch.Tensor:
        last = inputs["attention_mask"].sum(-1) - 1
        logits = self.model(**inputs).logits
        return logits[torch.arange(len(last)), last][:, CLASS_TOKEN_IDS]


class OfKeywords(Answering):
    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.answers(**inputs)


class OfKeywordsAlone(Answering):
    def forward(self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.answers(input_ids=input_ids, attention_mask=attention_mask)


class OfNamedInputs(Answering):
    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert attention_mask is not None
        return self.answers(input_ids=input_ids, attention_mask=attention_mask)


@pytest.mark.parametrize("wrapper", [OfKeywords, OfKeywordsAlone, OfNamedInputs])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_wrapper_whose_forward_takes_keywords_gives_what_class_tokens_give(structure, wrapper):
    model = lora_model("gpt2").eval()
    batches = ragged_batches()
    expected = make(model, structure, class_token_ids=CLASS_TOKEN_IDS)
    found = make(wrapper(model), structure)
    for la in (expected, found):
        la.fit(batches)
    assert_close(found.log_marginal_likelihood(), expected.log_marginal_likelihood(), **EXACT)
    assert_close(found(batches[0]), expected(batches[0]), **EXACT)


@pytest.mark.parametrize("labels", [None, torch.tensor([0, 2])])
def test_keywords_reach_a_wrapper_within_pefts(labels):
    """And tokens by themselves, which have no other place there."""

    class Pooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, 5)
            self.layer = nn.Linear(5, 3)

        def forward(self, *, input_ids: torch.Tensor) -> torch.Tensor:
            return self.layer(self.embedding(input_ids).mean(1))

    plain = Pooling()
    tokens = torch.tensor([[1, 2], [3, 4]])
    model = LogitsModel(get_peft_model(plain, LoraConfig(target_modules=["layer"])))
    expected = plain(input_ids=tokens)
    assert torch.equal(model({"input_ids": tokens, "labels": labels}), expected)
    assert torch.equal(model(tokens), expected)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_model_may_be_called_as_transformers_models_are(kind):
    model = adapted(kind)
    batch, *_ = ragged_batches()
    assert torch.equal(model(**batch), model(batch))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_labels_that_are_none_are_no_labels(structure):
    la = fitted(structure=structure)
    batch, *_ = ragged_batches()
    expected = la.predict_proba(batch)
    unlabelled = batch | {"labels": None}
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    assert torch.equal(la(unlabelled), la(batch))
    assert (la.predict_proba(unlabelled) == expected).all()
    for given in (unlabelled, (inputs, None), [inputs, None]):
        assert (la.predict_proba([given]) == expected).all()
        if structure == "lowrank_kron":
            assert la.predictive_statistics([given]).targets is None
    for unlearnable in (unlabelled, (inputs, None)):
        with pytest.raises(ValueError, match=r"batch 1: No labels .*\['attention_mask', 'input_"):
            la.fit([batch, unlearnable])
    with pytest.raises(TypeError, match="not Tensor without labels"):
        la.model.split((inputs["input_ids"], None))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_empty_batches_are_left_out_and_others_keep_their_numbers(structure):
    batches = ragged_batches()
    empty = {key: value[:0] for key, value in batches[0].items()}
    la = fitted(batches=batches, structure=structure)
    evidence = la.log_marginal_likelihood()
    la.fit([empty, *batches, empty])
    assert torch.equal(la.log_marginal_likelihood(), evidence)
    X = torch.randn(2, 3)
    loader = [(X, X), (X[:0], X[:0]), X[:0], {"x": X[:0], "y": 3}, {"x": [1]}, ({"x": X}, X)]
    assert [name for name, _ in named_batches(loader)] == ["batch 0", "batch 4", "batch 5"]


def packed(batch: dict) -> dict:
    return batch | {"position_ids": torch.tensor([0, 1, 2, 3, 0, 1, 2]).expand(3, 7)}


RESTARTING = torch.tensor([0, 1, 2, 3, 0, 1, 2])
PACKED = {
    "position_ids": RESTARTING.expand(3, 7),
    "position_ids of all rows": RESTARTING[None],
    "position_ids of text and images": torch.stack([RESTARTING, *[torch.arange(7)] * 3])[:, None],
    "position_ids of three axes": RESTARTING.expand(3, 3, 7),
    "attention_mask": torch.tensor([1, 1, 1, 2, 2, 3, 3]).expand(3, 7),
    "attention_mask of floats": torch.tensor([1.0, 1, 1, 2, 2, 0, 0]).expand(3, 7),
    "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1, 2]]).int(),
    "cu_seq_lens_q": torch.tensor([0, 3, 7, 14, 21]).int(),
    "cu_seq_lens_k": torch.tensor([0, 3, 7, 14, 21]).int(),
}


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
@pytest.mark.parametrize("shown_by", PACKED)
def test_several_texts_in_a_row_are_refused_by_what_shows_them(shown_by, kind):
    (batch,) = ragged_batches(lengths=(7, 7, 7))
    key = shown_by.partition(" ")[0]
    with pytest.raises(NotImplementedError, match=f"as {key} shows: give each text a row of its"):
        adapted(kind, pad=None)(batch | {key: PACKED[shown_by]})
    embedded = {key: value for key, value in batch.items() if key != "input_ids"}
    embedded["inputs_embeds"] = torch.randn(3, 7, 12).double()
    with pytest.raises(NotImplementedError, match=f"as {key} shows"):
        adapted(kind, pad=None)(embedded | {key: PACKED[shown_by]})


def test_packed_texts_of_supervised_fine_tuning_are_refused():
    """As transformers' `DataCollatorWithFlattening` makes them; one text by itself is none."""
    model = TokensModel(lora_model("gpt2").eval())
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    of_two = {
        "position_ids": torch.tensor([[0, 1, 2, 0, 1]]),
        "seq_idx": torch.tensor([[0, 0, 0, 1, 1]]),
        "cu_seq_lens_q": torch.tensor([0, 3, 5]),
        "cu_seq_lens_k": torch.tensor([0, 3, 5]),
    }
    of_one = {
        "position_ids": torch.arange(5)[None],
        "seq_idx": torch.zeros(1, 5),
        "cu_seq_lens_q": torch.tensor([0, 5]),
        "cu_seq_lens_k": torch.tensor([0, 5]),
    }
    batch = {"input_ids": tokens, "labels": tokens}
    for key, numbers in of_two.items():
        check_texts({"input_ids": tokens, key: of_one[key]}, model.transformer)
        with pytest.raises(NotImplementedError, match=f"as {key} shows"):
            model(batch | {key: numbers})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: packed(b) | {"attention_mask": torch.ones(3, 7)}, "as position_ids shows"),
        (lambda b: {"input_ids": b["input_ids"]}, "no attention_mask, but the padding token 3"),
        (lambda b: b["input_ids"], "pass the tokenizer's attention_mask"),
    ],
)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_what_a_model_would_read_in_another_way_is_refused(kind, side, change, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        adapted(kind)(change(padded_batch(side)))


def test_what_only_looks_packed_or_padded_is_not_refused():
    model = adapted("gpt2")
    batch = padded_batch()
    model(packed(batch) | {"attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0, 0]]).expand(3, 7)})
    each_row = {"cu_seq_lens_q": torch.tensor([0, 7, 14, 21]), "seq_idx": torch.zeros(3, 7)}
    check_texts(batch | each_row, model.transformer)
    axes = torch.arange(7).repeat(4, 3, 1)
    axes[2] = torch.tensor([0, 1, 2, 1, 2, 3, 4])  # columns of an image
    check_texts(batch | {"position_ids": axes}, model.transformer)
    longformer = LongformerForSequenceClassification(
        LongformerConfig(vocab_size=60, hidden_size=12, num_hidden_layers=1, num_attention_heads=2)
    )
    check_texts(batch | {"attention_mask": torch.tensor([[2, 1, 1, 1, 1, 0, 0]])}, longformer)
    (batch,) = ragged_batches(lengths=(7, 7))
    batch["input_ids"][batch["input_ids"] == PAD] += 1
    batch["input_ids"][0, 2] = PAD  # inside of a text
    assert torch.equal(model({"input_ids": batch["input_ids"]}), model(batch))


def test_what_lies_by_position_comes_with_its_tokens_and_nothing_else_does():
    """Of a language model: how a classifier pools is its own, and given positions stay."""
    (batch,) = ragged_batches(lengths=(4, 7, 5), padding_side="left")
    mask = batch["attention_mask"]
    types = torch.arange(7).expand(3, 7)
    features = torch.randn(3, 7, 2)
    given = batch | {"token_type_ids": types, "decoder_x": types, "pixel_values": features}
    moved = text_first(given)
    assert moved["attention_mask"].tolist() == [[1] * n + [0] * (7 - n) for n in (4, 7, 5)]
    assert torch.equal(moved["token_type_ids"][mask.bool().flip(1)], types[mask.bool()])
    assert moved["decoder_x"] is types
    assert moved["pixel_values"] is features
    for kind, more in (("bert", {}), ("gpt2", {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)})):
        calls = record_calls((model := adapted(kind)).model.base_model.model)
        model(batch | more)
        assert torch.equal(calls[-1]["attention_mask"], mask)
