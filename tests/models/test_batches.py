"""Batches as people have them."""

from collections import UserDict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
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
from laplace_lora_ext.tasks.language import TokensModel
from tests.support.dense import EXACT
from tests.support.models import (
    CLASS_TOKEN_IDS,
    VOCABULARY,
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


def keep_padding_out_of_texts(batch: Batch) -> None:
    """Put another token where a text has the padding token by chance."""
    ids = batch["input_ids"]
    ids[ids == PAD] += 1


def padded_batch(side: str = "right") -> Batch:
    """Make a batch with its mask, whose texts don't hold the padding token."""
    (batch,) = ragged_batches(lengths=(4, 7, 5), padding_side=side)
    keep_padding_out_of_texts(batch)
    is_padding = batch["attention_mask"] == 0
    batch["input_ids"][is_padding] = PAD
    return batch


def without(batch: Mapping[str, Any], left_out: str) -> Batch:
    """Copy a batch without one of its keys."""
    copy = dict(batch)
    del copy[left_out]
    return copy


def in_a_pair(batch: Batch) -> tuple[Batch, Tensor]:
    """Take the labels out of a batch, and put them beside it."""
    inputs = without(batch, "labels")
    return inputs, batch["labels"]


@pytest.fixture
def batch() -> Batch:
    """The first of `ragged_batches`."""
    return first_batch()


# --- mappings, pairs and keywords -----------------------------------------------------


def read_only(batch: Batch) -> MappingProxyType:
    return MappingProxyType(dict(batch))


MAPPINGS = [dict, UserDict, BatchEncoding, read_only]


def evidence_of(model: nn.Module, batches: Sequence[Any]) -> Tensor:
    """Fit a posterior, and compute its log marginal likelihood."""
    la = make(model)
    la.fit(batches)
    return la.log_marginal_likelihood()


@pytest.mark.parametrize("as_given", [*MAPPINGS, in_a_pair])
def test_every_mapping_and_a_pair_fit_and_predict_the_same_and_stay_as_they_were(
    bert, as_given
):
    batches = ragged_batches()
    given = [as_given(batch) for batch in batches]
    before = [dict(each) if as_given is not in_a_pair else each for each in given]
    found = evidence_of(bert, given)
    assert torch.equal(found, evidence_of(bert, batches))
    if as_given is in_a_pair:
        return
    logits = make(bert).model(given[0])
    assert torch.equal(logits, bert(**without(batches[0], "labels")).logits)
    for each, as_it_was in zip(given, before, strict=True):
        assert list(each) == list(as_it_was)
        for key, value in as_it_was.items():
            assert each[key] is value


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
    batch = {
        "x": torch.randn(2, 5).double(),
        "labels": torch.ones(2),
        "lengths": [3, 4],
    }
    model = LogitsModel(module)
    model(mapping(batch))
    (taken,) = module.taken
    assert type(taken) is mapping
    assert list(taken) == ["x", "lengths"]


class Answering(nn.Module):
    """A user's wrapper, which reads the answers itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def answers(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        output = self.model(input_ids=input_ids, attention_mask=attention_mask)
        last = attention_mask.sum(-1) - 1
        rows = torch.arange(len(last))
        after_last = output.logits[rows, last]
        return after_last[:, CLASS_TOKEN_IDS]


class OfKeywords(Answering):
    def forward(self, **inputs: Tensor) -> Tensor:
        return self.answers(**inputs)


class OfKeywordsAlone(Answering):
    def forward(self, *, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.answers(input_ids, attention_mask)


class OfNamedInputs(Answering):
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        # It is optional by its signature alone.
        assert attention_mask is not None
        return self.answers(input_ids, attention_mask)


@pytest.mark.parametrize(
    ("wrapper", "structure"),
    [
        (OfKeywords, "lowrank_kron"),
        (OfKeywordsAlone, "lowrank_kron"),
        (OfNamedInputs, "lowrank_kron"),
        (OfNamedInputs, "kron"),
    ],
)
def test_a_wrapper_whose_forward_takes_keywords_gives_what_class_tokens_give(
    gpt2, structure, wrapper
):
    batches = ragged_batches()
    expected = make(gpt2, structure, class_token_ids=CLASS_TOKEN_IDS)
    found = make(wrapper(gpt2), structure)
    evidences = []
    for la in (expected, found):
        la.fit(batches)
        evidences.append(la.log_marginal_likelihood())
    assert_close(*evidences, **EXACT)
    assert_close(found(batches[0]), expected(batches[0]), **EXACT)


class Pooling(nn.Module):
    """Takes tokens by keyword alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 5)
        self.layer = nn.Linear(5, 3)

    def forward(self, *, input_ids: Tensor) -> Tensor:
        embedded = self.embedding(input_ids)
        return self.layer(embedded.mean(1))


TOKENS = torch.tensor([[1, 2], [3, 4]])
LABELS = torch.tensor([0, 2])


@pytest.mark.parametrize(
    "given",
    [
        {"input_ids": TOKENS, "labels": None},
        {"input_ids": TOKENS, "labels": LABELS},
        # Tokens by themselves have no other place there.
        TOKENS,
    ],
    ids=["without labels", "with labels", "tokens alone"],
)
def test_keywords_reach_a_wrapper_within_pefts(given):
    plain = Pooling()
    config = LoraConfig(target_modules=["layer"])
    wrapped = get_peft_model(plain, config)
    model = LogitsModel(wrapped)
    # An adapter that is not trained yet changes nothing.
    expected = plain(input_ids=TOKENS)
    assert torch.equal(model(given), expected)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_model_may_be_called_as_transformers_models_are(kind, batch):
    model = adapted(kind)
    assert torch.equal(model(**batch), model(batch))


# --- labels that are none, batches that are empty -------------------------------------


def labels_of_none(batch: Batch) -> Batch:
    return batch | {"labels": None}


def a_pair_with_none(batch: Batch) -> tuple[Batch, None]:
    return without(batch, "labels"), None


def a_list_with_none(batch: Batch) -> list[Any]:
    return [without(batch, "labels"), None]


# As loaders of texts to predict make them.
UNLABELLED = [labels_of_none, a_pair_with_none, a_list_with_none]


@pytest.mark.parametrize("unlabel", UNLABELLED)
def test_labels_that_are_none_are_not_asked_for_by_predictions(batch, unlabel):
    la = fitted()
    expected = la.predict_proba(batch)
    unlabelled = unlabel(batch)
    assert (la.predict_proba([unlabelled]) == expected).all()
    assert la.predictive_statistics([unlabelled]).targets is None
    if unlabel is labels_of_none:
        assert torch.equal(la(unlabelled), la(batch))
        assert (la.predict_proba(unlabelled) == expected).all()


@pytest.mark.parametrize("structure", OURS_AND_A_HOSTS)
def test_empty_batches_are_left_out(structure):
    batches = ragged_batches()
    empty = {key: value[:0] for key, value in first_batch().items()}
    la = fitted(batches=batches, structure=structure)
    expected = la.log_marginal_likelihood()
    la.fit([empty, *batches, empty])
    found = la.log_marginal_likelihood()
    assert torch.equal(found, expected)


def test_batches_keep_their_numbers_where_empty_ones_are_left_out():
    X = torch.randn(2, 3)
    none = X[:0]
    loader = [
        (X, X),
        (none, none),
        none,
        {"x": none, "y": 3},
        # Nothing says of it that it is empty.
        {"x": [1]},
        ({"x": X}, X),
    ]
    names = [name for name, _ in named_batches(loader)]
    # Numbers that a user finds again in the loader.
    assert names == ["batch 0", "batch 4", "batch 5"]


@pytest.mark.parametrize("unlabel", UNLABELLED[:2])
def test_labels_that_are_none_fit_nothing(bert, batch, unlabel):
    la = make(bert)
    with pytest.raises(ValueError, match=r"batch 1: No labels .*'attention_mask'"):
        la.fit([batch, unlabel(batch)])
    with pytest.raises(TypeError, match="not Tensor without labels"):
        la.model.split((batch["input_ids"], None))


# --- several texts in a row -----------------------------------------------------------

IN_ORDER = torch.arange(7)
RESTARTING = torch.tensor([0, 1, 2, 3, 0, 1, 2])
# Axes for text, time, rows and columns: the first restarts.
OF_TEXT_AND_IMAGES = torch.stack([RESTARTING, IN_ORDER, IN_ORDER, IN_ORDER])


@pytest.mark.parametrize("key", ["input_ids", "inputs_embeds"])
@pytest.mark.parametrize(
    ("shows", "numbers"),
    [
        ("position_ids", RESTARTING.expand(3, 7)),
        ("position_ids", RESTARTING[None]),
        ("position_ids", OF_TEXT_AND_IMAGES[:, None]),
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


def test_packed_texts_of_supervised_fine_tuning_are_refused(gpt2):
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    packed = {"position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    model = TokensModel(gpt2)
    with pytest.raises(NotImplementedError, match="as position_ids shows"):
        model(packed | {"input_ids": tokens, "labels": tokens})


# --- texts that a model would read in another way -------------------------------------


def packed_with_a_mask_of_ones(batch: Batch) -> Batch:
    return batch | {
        "position_ids": RESTARTING.expand(3, 7),
        "attention_mask": torch.ones(3, 7),
    }


def without_a_mask(batch: Batch) -> Batch:
    return without(batch, "attention_mask")


def tokens_alone(batch: Batch) -> Tensor:
    return batch["input_ids"]


def with_an_empty_text(batch: Batch) -> Batch:
    mask = batch["attention_mask"].clone()
    mask[1] = 0
    return batch | {"attention_mask": mask}


def of_no_tokens(batch: Batch) -> Tensor:
    return batch["input_ids"][:, :0]


def with_names_of_adapters(batch: Batch) -> Batch:
    return batch | {"adapter_names": ["default", "__base__", "default"]}


CHANGES = [
    (packed_with_a_mask_of_ones, "as position_ids shows"),
    (without_a_mask, "no attention_mask, but the padding token 3"),
    (tokens_alone, "pass the tokenizer's attention_mask"),
    (with_an_empty_text, "Row 1 has no text"),
    (of_no_tokens, "Row 0 has no text"),
    (with_names_of_adapters, "adapter_names"),
]


@pytest.mark.parametrize(("kind", "side"), [("bert", "right"), ("gpt2", "left")])
def test_what_a_model_would_read_in_another_way_is_refused(kind, side):
    model = adapted(kind)
    batch = padded_batch(side)
    for change, message in CHANGES:
        with pytest.raises((ValueError, NotImplementedError), match=message):
            model(change(batch))


def with_pairs(batch: Batch) -> Batch:
    pairs = {}
    for key in ("input_ids", "attention_mask"):
        pairs[key] = torch.stack([batch[key], batch[key]], dim=1)
    return pairs | {"labels": torch.zeros(3, dtype=torch.long)}


def with_choices(batch: Batch) -> Batch:
    pairs = with_pairs(batch)
    # The last place of a text, whose token follows.
    pairs["score_mask"] = torch.zeros_like(pairs["input_ids"])
    pairs["score_mask"][..., 2] = 1
    return pairs


ADAPTED = {
    "a classifier": ("LlamaForSequenceClassification", "classification", dict),
    "rewards": ("LlamaForSequenceClassification", "reward_modeling", with_pairs),
    "answers": ("LlamaForCausalLM", "classification", dict),
    "choices": ("LlamaForCausalLM", "classification", with_choices),
    "an encoder-decoder": ("BartForConditionalGeneration", "classification", dict),
}


@pytest.mark.parametrize("case", ADAPTED)
def test_a_text_without_a_token_is_neither_fitted_nor_predicted(case):
    name, likelihood, convert = ADAPTED[case]
    base = built(name)
    options = {}
    if base.can_generate() and case != "choices":
        options["class_token_ids"] = CLASS_TOKEN_IDS
    if likelihood == "reward_modeling":
        base = built(name, num_labels=1)
    model = with_lora(base, "q_proj").float()
    la = make(model, likelihood=likelihood, **options)
    batch = convert(padded_batch())
    la.fit([batch])
    empty = dict(batch)
    empty["attention_mask"] = batch["attention_mask"].clone()
    # Of several texts, the last one.
    empty["attention_mask"][2:].flatten(0, -2)[-1] = 0
    with pytest.raises(ValueError, match="batch 0: Row 2 has no text"):
        la.fit([empty])
    with pytest.raises(ValueError, match="Row 2 has no text"):
        la(empty)


def test_positions_in_padding_and_of_images_are_not_refused():
    model = adapted("gpt2")
    batch = padded_batch()
    right = torch.tensor([1, 1, 1, 1, 0, 0, 0]).expand(3, 7)
    left = torch.tensor([0, 0, 0, 0, 1, 1, 1]).expand(3, 7)
    for mask in (right, left):
        model(batch | {"position_ids": RESTARTING.expand(3, 7), "attention_mask": mask})
    # Places in the text, and in time, rows and columns.
    axes = IN_ORDER.repeat(4, 3, 1)
    axes[2] = torch.tensor([0, 1, 2, 1, 2, 3, 4])
    check_texts(batch | {"position_ids": axes}, model.transformer)


def test_a_padding_token_inside_of_a_text_is_not_refused():
    model = adapted("gpt2")
    (batch,) = ragged_batches(lengths=(7, 7))
    keep_padding_out_of_texts(batch)
    batch["input_ids"][0, 2] = PAD
    expected = model(batch)
    unmasked = without(batch, "attention_mask")
    assert torch.equal(model(unmasked), expected)


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
    assert not positions_of(
        {"input_ids": ids, "pixels": torch.ones(4, 2)}, 4, cpu
    ).is_text
    # Windows, of which texts have other numbers.
    assert positions_of(ids, 3, cpu).n_tokens is None


# --- padding on the left --------------------------------------------------------------


@pytest.fixture
def padded_left() -> Batch:
    (batch,) = ragged_batches(lengths=(4, 7, 5), padding_side="left")
    return batch


def test_what_lies_by_position_comes_with_its_tokens(padded_left):
    mask = padded_left["attention_mask"]
    types = IN_ORDER.expand(3, 7)
    moved = text_first(padded_left | {"token_type_ids": types})
    # Of ones behind zeros, the mirror image has the ones first.
    expected_mask = mask.flip(1)
    assert torch.equal(moved["attention_mask"], expected_mask)
    is_text = expected_mask.bool()
    found = moved["token_type_ids"][is_text]
    expected = types[mask.bool()]
    assert torch.equal(found, expected)


def test_a_decoders_inputs_and_images_stay_where_they_are(padded_left):
    # Both have a number for each place by chance.
    of_decoder = IN_ORDER.expand(3, 7)
    pixels = torch.randn(3, 7, 2)
    more = {"decoder_x": of_decoder, "pixel_values": pixels}
    moved = text_first(padded_left | more)
    assert moved["decoder_x"] is of_decoder
    assert moved["pixel_values"] is pixels


def mask_read(kind: str, batch: Batch) -> Tensor:
    """Take the mask that a transformer is given for a batch."""
    model = adapted(kind)
    transformer = model.model.base_model.model
    calls = record_calls(transformer)
    model(batch)
    (keywords,) = calls
    return keywords["attention_mask"]


def test_classifiers_and_texts_with_positions_are_read_where_they_stand(padded_left):
    mask = padded_left["attention_mask"]
    # How it pools is its own.
    assert torch.equal(mask_read("bert", padded_left), mask)
    padded_left["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
    assert torch.equal(mask_read("gpt2", padded_left), mask)
