"""Batches as people have them."""

from collections import UserDict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import BatchEncoding

from laplace_lora_ext.models.batches import (
    check_texts,
    named_batches,
    positions_of,
    text_first,
)
from laplace_lora_ext.models.logits_model import LogitsModel
from tests.support.dense import EXACT
from tests.support.models import (
    CLASS_TOKEN_IDS,
    built,
    first_batch,
    lora_model,
    plain_model,
    ragged_batches,
    record_calls,
    with_lora,
)
from tests.support.posteriors import OURS_AND_A_HOSTS, fitted, make

PAD = 3

Batch = dict[str, Any]


def adapted(kind: str, pad: int | None = PAD) -> LogitsModel:
    """Adapt a model whose configuration names a padding token, or none."""
    model = lora_model(kind).eval()
    model.config.pad_token_id = pad
    if kind == "bert":
        return LogitsModel(model)
    return LogitsModel(model, CLASS_TOKEN_IDS)


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


def in_a_pair(batch: Batch) -> tuple[Batch, Tensor]:
    """Take the labels out of a batch, and put them beside it."""
    return without(batch, "labels"), batch["labels"]


@pytest.fixture
def batch() -> Batch:
    """The first of `ragged_batches`."""
    return first_batch()


# --- mappings, pairs and keywords -----------------------------------------------------


MAPPINGS = [UserDict, BatchEncoding, MappingProxyType]


@pytest.mark.parametrize("as_given", [*MAPPINGS, in_a_pair])
def test_every_mapping_and_a_pair_fit_and_predict_the_same_and_stay_as_they_were(
    bert, as_given
):
    batches = ragged_batches()
    given = [as_given(batch) for batch in batches]
    la, expected = make(bert), make(bert)
    la.fit(given)
    expected.fit(batches)
    assert torch.equal(la.loss, expected.loss)
    if as_given is not in_a_pair:
        # A posterior takes them with their labels.
        assert torch.equal(la(given[0]), expected(batches[0]))
        for each, batch in zip(given, batches, strict=True):
            assert list(each) == list(batch)
            assert all(each[key] is batch[key] for key in batch)


class Taking(nn.Module):
    """A user's module, which remembers what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = plain_model()
        self.taken: list[Any] = []

    def forward(self, batch: Mapping) -> Tensor:
        self.taken.append(batch)
        return self.inner(batch["x"])


@pytest.mark.parametrize("mapping", [dict, BatchEncoding])
def test_a_users_module_gets_the_mapping_without_labels_as_it_is(mapping):
    module = Taking()
    x = torch.randn(2, 5).double()
    batch = {"x": x, "labels": torch.ones(2), "lengths": [3, 4]}
    LogitsModel(module)(mapping(batch))
    (taken,) = module.taken
    assert type(taken) is mapping
    assert list(taken) == ["x", "lengths"]


class OfKeywords(nn.Module):
    """A user's wrapper, which reads the answers itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        output = self.model(**inputs)
        last = inputs["attention_mask"].sum(-1) - 1
        return output.logits[torch.arange(len(last)), last][:, CLASS_TOKEN_IDS]


class OfNamedInputs(OfKeywords):
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        # It is optional by its signature alone.
        assert attention_mask is not None
        return super().forward(input_ids=input_ids, attention_mask=attention_mask)


@pytest.mark.parametrize(
    ("wrapper", "structure"), [(OfKeywords, "lowrank_kron"), (OfNamedInputs, "kron")]
)
def test_a_wrapper_whose_forward_takes_keywords_gives_what_class_tokens_give(
    gpt2, structure, wrapper
):
    batches = ragged_batches()
    expected = make(gpt2, structure, class_token_ids=CLASS_TOKEN_IDS)
    found = make(wrapper(gpt2), structure)
    for la in (expected, found):
        la.fit(batches)
    assert_close(found.loss, expected.loss, **EXACT)
    assert_close(found(batches[0]), expected(batches[0]), **EXACT)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_model_may_be_called_as_transformers_models_are(kind, batch):
    model = adapted(kind)
    assert torch.equal(model(**batch), model(batch))


# --- labels that are none, batches that are empty -------------------------------------


def test_labels_that_are_none_are_not_asked_for_by_predictions_alone(batch):
    la = fitted()
    expected = la.predict_proba(batch)
    inputs, none = without(batch, "labels"), batch | {"labels": None}
    # As loaders of texts to predict make them.
    for unlabelled in (none, (inputs, None), [inputs, None]):
        assert (la.predict_proba([unlabelled]) == expected).all()
        assert la.predictive_statistics([unlabelled]).targets is None
        with pytest.raises(ValueError, match=r"batch 1: No labels"):
            la.fit([batch, unlabelled])
    assert (la.predict_proba(none) == expected).all()
    with pytest.raises(TypeError, match="without labels"):
        la.model.split((batch["input_ids"], None))


@pytest.mark.parametrize("structure", OURS_AND_A_HOSTS)
def test_empty_batches_are_left_out_and_the_others_keep_their_numbers(structure):
    batches = ragged_batches()
    empty = {key: value[:0] for key, value in first_batch().items()}
    la = fitted(batches=batches, structure=structure)
    expected = la.loss
    la.fit([empty, *batches, empty])
    assert torch.equal(la.loss, expected)
    X = torch.randn(2, 3)
    loader = [(X, X), (X[:0], X[:0]), X[:0], {"x": X[:0], "y": 3}, {"x": [1]}]
    # Nothing says of the last that it is empty.
    assert [name for name, _ in named_batches(loader)] == ["batch 0", "batch 4"]


# --- several texts in a row -----------------------------------------------------------

IN_ORDER = torch.arange(7)
RESTARTING = torch.tensor([0, 1, 2, 3, 0, 1, 2])


@pytest.mark.parametrize("key", ["input_ids", "inputs_embeds"])
@pytest.mark.parametrize(
    ("shows", "numbers"),
    [
        ("position_ids", RESTARTING.expand(3, 7)),
        ("position_ids", RESTARTING[None]),
        # Axes for text, time, rows and columns, of which the first restarts.
        ("position_ids", torch.stack([RESTARTING, *[IN_ORDER] * 3])[:, None]),
        # As transformers' `DataCollatorWithFlattening` makes them.
        ("seq_idx", torch.tensor([[0, 0, 0, 1, 1, 1, 2]])),
        ("cu_seq_lens_q", torch.tensor([0, 3, 7, 14, 21])),
    ],
    ids=["of all rows", "of one row", "of images", "seq_idx", "cu_seq_lens_q"],
)
def test_several_texts_in_a_row_are_refused_by_what_shows_them(key, shows, numbers):
    (batch,) = ragged_batches(lengths=(7, 7, 7))
    if key == "inputs_embeds":
        batch = without(batch, "input_ids") | {key: torch.randn(3, 7, 12).double()}
    model = adapted("gpt2", pad=None)
    with pytest.raises(NotImplementedError, match=f"as {shows} shows"):
        model(batch | {shows: numbers})


# --- texts that a model would read in another way -------------------------------------


@pytest.mark.parametrize(("kind", "side"), [("bert", "right"), ("gpt2", "left")])
def test_what_a_model_would_read_in_another_way_is_refused(kind, side):
    model = adapted(kind)
    batch = padded_batch(side)
    ids = batch["input_ids"]
    empty = batch["attention_mask"].clone()
    empty[1] = 0
    packed = {
        "position_ids": RESTARTING.expand(3, 7),
        "attention_mask": torch.ones(3, 7),
    }
    for given, message in (
        (batch | packed, "as position_ids shows"),
        (without(batch, "attention_mask"), "no attention_mask, but .* token 3"),
        (ids, "attention_mask"),
        (batch | {"attention_mask": empty}, "Row 1 has no text"),
        (ids[:, :0], "Row 0 has no text"),
        (batch | {"adapter_names": ["default"] * 3}, "adapter_names"),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=message):
            model(given)


def test_positions_and_padding_tokens_that_harm_nothing_are_not_refused():
    model = adapted("gpt2")
    batch = padded_batch()
    positions = {"position_ids": RESTARTING.expand(3, 7)}
    # One text, and padding behind or before it.
    for mask in ([1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1]):
        padded = {"attention_mask": torch.tensor(mask).expand(3, 7)}
        model(batch | positions | padded)
    # Places in the text, and in time, rows and columns.
    axes = IN_ORDER.repeat(4, 3, 1)
    axes[2] = torch.tensor([0, 1, 2, 1, 2, 3, 4])
    check_texts(batch | {"position_ids": axes}, model.transformer)
    # A padding token inside of a text.
    batch["input_ids"][1, 2] = PAD
    whole = {key: value[1:2] for key, value in batch.items()}
    assert torch.equal(model(without(whole, "attention_mask")), model(whole))


def of_pairs(batch: Batch) -> Batch:
    """Double each text, and let the token behind its third place count."""
    keys = ("input_ids", "attention_mask")
    pairs = {key: torch.stack([batch[key]] * 2, dim=1) for key in keys}
    counts = torch.zeros_like(pairs["input_ids"])
    counts[..., 2] = 1
    return pairs | {"score_mask": counts, "labels": torch.zeros(3, dtype=torch.long)}


def of_rewards(batch: Batch) -> Batch:
    return without(of_pairs(batch), "score_mask")


ADAPTED = {
    "a classifier": ("LlamaForSequenceClassification", "classification", dict),
    "rewards": ("LlamaForSequenceClassification", "reward_modeling", of_rewards),
    "answers": ("LlamaForCausalLM", "classification", dict),
    "choices": ("LlamaForCausalLM", "classification", of_pairs),
    "an encoder-decoder": ("BartForConditionalGeneration", "classification", dict),
}


@pytest.mark.parametrize("case", ADAPTED)
def test_a_text_without_a_token_is_neither_fitted_nor_predicted(case):
    name, likelihood, convert = ADAPTED[case]
    base = built(name, num_labels=1 if case == "rewards" else 3)
    options = {}
    if convert is dict and base.can_generate():
        options["class_token_ids"] = CLASS_TOKEN_IDS
    la = make(with_lora(base, "q_proj").float(), likelihood=likelihood, **options)
    batch = convert(padded_batch())
    la.fit([batch])
    mask = batch["attention_mask"].clone()
    # Of several texts, the last one.
    mask[2:].flatten(0, -2)[-1] = 0
    empty = batch | {"attention_mask": mask}
    with pytest.raises(ValueError, match="batch 0: Row 2 has no text"):
        la.fit([empty])
    with pytest.raises(ValueError, match="Row 2 has no text"):
        la(empty)


# --- rows of a batch ------------------------------------------------------------------


def test_positions_know_the_padding_of_each_example_and_what_is_beside_texts():
    cpu = torch.device("cpu")
    ids = torch.ones(4, 3, dtype=torch.long)
    mask = torch.tensor([[1, 1, 0]])
    for given in (mask, mask.expand(4, 3)):
        # A mask of one row is that of all; two texts are an example.
        found = positions_of({"input_ids": ids, "attention_mask": given}, 2, cpu)
        assert torch.equal(found.mask, mask.bool().repeat(2, 2))
        assert (found.n_rows, found.n_tokens, found.is_text) == (4, 12, False)
    found = positions_of({"input_ids": ids, "attention_mask": ids}, 4, cpu)
    assert found.mask is None
    assert found.is_text
    beside = {"input_ids": ids, "pixels": torch.ones(4, 2)}
    assert not positions_of(beside, 4, cpu).is_text
    # Windows, of which texts have other numbers.
    assert positions_of(ids, 3, cpu).n_tokens is None


# --- padding on the left --------------------------------------------------------------


def test_padding_on_the_left_moves_behind_the_text_with_all_that_lies_by_position():
    batch = padded_batch("left")
    mask = batch["attention_mask"]
    types = IN_ORDER.expand(3, 7)
    # Of these both have a number for each place by chance.
    others = {"decoder_x": types, "pixel_values": torch.randn(3, 7, 2)}
    moved = text_first(batch | {"token_type_ids": types} | others)
    # Of ones behind zeros, the mirror image has the ones first.
    assert torch.equal(moved["attention_mask"], mask.flip(1))
    found = moved["token_type_ids"][mask.flip(1).bool()]
    assert torch.equal(found, types[mask.bool()])
    for key, value in others.items():
        assert moved[key] is value

    # How a classifier pools is its own, and given positions stay where they are.
    positions = {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    for kind, given in (("bert", batch), ("gpt2", batch | positions)):
        model = adapted(kind)
        calls = record_calls(model.model.base_model.model)
        model(given)
        assert torch.equal(calls[0]["attention_mask"], mask)
