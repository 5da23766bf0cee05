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
from transformers import (
    BatchEncoding,
    LongformerConfig,
    LongformerForSequenceClassification,
)

from laplace_lora_ext.models.batches import (
    check_texts,
    named_batches,
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
from tests.support.posteriors import OURS_AND_A_HOSTS, fitted, make, with_structures

PAD = 3

Batch = dict[str, Any]

# Where a classifier reads, and where a language model that classifies.
kinds = pytest.mark.parametrize("kind", ["bert", "gpt2"])
structures = pytest.mark.parametrize("structure", OURS_AND_A_HOSTS)


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


def keep_padding_out_of_texts(batch: Batch) -> None:
    """Put another token where a text has the padding token by chance."""
    ids = batch["input_ids"]
    ids[ids == PAD] += 1


def padded_batch(side: str = "right") -> Batch:
    """Make a batch with its mask, whose texts don't hold the padding token."""
    (batch,) = ragged_batches(
        lengths=(4, 7, 5),
        padding_side=side,
    )
    keep_padding_out_of_texts(batch)
    is_padding = batch["attention_mask"] == 0
    batch["input_ids"][is_padding] = PAD
    return batch


def without(
    batch: Mapping[str, Any],
    left_out: str,
) -> Batch:
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
mappings = pytest.mark.parametrize("mapping", MAPPINGS)


def evidence_of(
    model: nn.Module,
    batches: Sequence[Any],
) -> Tensor:
    """Fit a posterior, and compute its log marginal likelihood."""
    la = make(model)
    la.fit(batches)
    return la.log_marginal_likelihood()


@pytest.mark.parametrize("as_given", [*MAPPINGS, in_a_pair])
def test_every_mapping_and_a_pair_fit_the_same(bert, as_given):
    batches = ragged_batches()
    given = [as_given(batch) for batch in batches]
    found = evidence_of(bert, given)
    expected = evidence_of(bert, batches)
    assert torch.equal(found, expected)


@mappings
def test_every_mapping_gives_the_same_logits(bert, batch, mapping):
    inputs = without(batch, "labels")
    expected = bert(**inputs).logits
    la = make(bert)
    given = mapping(batch)
    found = la.model(given)
    assert torch.equal(found, expected)


@mappings
def test_mappings_are_left_as_they_were(bert, batch, mapping):
    given = mapping(batch)
    before = dict(given)
    la = make(bert)
    la.fit([given])
    la.model(given)
    # They hold the same tensor objects, of which "equal" would say nothing.
    after = dict(given)
    assert list(after) == list(before)
    for key, value in before.items():
        assert after[key] is value


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

    def answers(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
    ) -> Tensor:
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
        )
        last = attention_mask.sum(-1) - 1
        rows = torch.arange(len(last))
        after_last = output.logits[rows, last]
        return after_last[:, CLASS_TOKEN_IDS]


class OfKeywords(Answering):
    def forward(self, **inputs: Tensor) -> Tensor:
        return self.answers(**inputs)


class OfKeywordsAlone(Answering):
    def forward(
        self,
        *,
        input_ids: Tensor,
        attention_mask: Tensor,
    ) -> Tensor:
        return self.answers(input_ids, attention_mask)


class OfNamedInputs(Answering):
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        # It is optional by its signature alone.
        assert attention_mask is not None
        return self.answers(input_ids, attention_mask)


@pytest.mark.parametrize(
    "wrapper",
    [
        OfKeywords,
        OfKeywordsAlone,
        OfNamedInputs,
    ],
)
@structures
def test_a_wrapper_whose_forward_takes_keywords_gives_what_class_tokens_give(
    gpt2,
    structure,
    wrapper,
):
    batches = ragged_batches()
    expected = make(gpt2, structure, class_token_ids=CLASS_TOKEN_IDS)
    expected.fit(batches)
    found = make(wrapper(gpt2), structure)
    found.fit(batches)
    assert_close(
        found.log_marginal_likelihood(),
        expected.log_marginal_likelihood(),
        **EXACT,
    )
    first = batches[0]
    p = found(first)
    assert_close(p, expected(first), **EXACT)


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


@kinds
def test_a_model_may_be_called_as_transformers_models_are(kind, batch):
    model = adapted(kind)
    found = model(**batch)
    assert torch.equal(found, model(batch))


# --- labels that are none, batches that are empty -------------------------------------


def test_labels_that_are_none_are_not_asked_for_by_predictions(batch):
    la = fitted()
    unlabelled = batch | {"labels": None}
    found = la(unlabelled)
    assert torch.equal(found, la(batch))
    found = la.predict_proba(unlabelled)
    expected = la.predict_proba(batch)
    assert (found == expected).all()


def labels_of_none(batch: Batch) -> Batch:
    return batch | {"labels": None}


def a_pair_with_none(batch: Batch) -> tuple[Batch, None]:
    return without(batch, "labels"), None


def a_list_with_none(batch: Batch) -> list[Any]:
    return [without(batch, "labels"), None]


# As loaders of texts to predict make them.
without_labels = pytest.mark.parametrize(
    "unlabel",
    [
        labels_of_none,
        a_pair_with_none,
        a_list_with_none,
    ],
)


@without_labels
def test_a_loader_may_have_labels_that_are_none(batch, unlabel):
    la = fitted()
    loader = [unlabel(batch)]
    found = la.predict_proba(loader)
    expected = la.predict_proba(batch)
    assert (found == expected).all()


@without_labels
def test_statistics_of_labels_that_are_none_have_no_targets(batch, unlabel):
    la = fitted()
    loader = [unlabel(batch)]
    statistics = la.predictive_statistics(loader)
    assert statistics.targets is None


@structures
def test_empty_batches_are_left_out(structure):
    batches = ragged_batches()
    empty = {}
    for key, value in first_batch().items():
        empty[key] = value[:0]
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


@pytest.mark.parametrize(
    ("structure", "unlabel"), with_structures([labels_of_none, a_pair_with_none])
)
def test_labels_that_are_none_fit_nothing(bert, batch, structure, unlabel):
    la = make(bert, structure)
    loader = [batch, unlabel(batch)]
    message = r"batch 1: No labels .*\['attention_mask', 'input_"
    with pytest.raises(ValueError, match=message):
        la.fit(loader)


def test_tokens_alone_have_no_labels_within_them(bert, batch):
    la = make(bert)
    tokens = batch["input_ids"]
    with pytest.raises(TypeError, match="not Tensor without labels"):
        la.model.split((tokens, None))


# --- several texts in a row -----------------------------------------------------------

IN_ORDER = torch.arange(7)
RESTARTING = torch.tensor([0, 1, 2, 3, 0, 1, 2])
# Axes for text, time, rows and columns: the first restarts.
OF_TEXT_AND_IMAGES = torch.stack([RESTARTING, IN_ORDER, IN_ORDER, IN_ORDER])
# The number of each token's text.
NUMBERED = torch.tensor([1, 1, 1, 2, 2, 3, 3])
NUMBERED_AND_PADDED = torch.tensor([1.0, 1, 1, 2, 2, 0, 0])
NUMBERED_FROM_0 = torch.tensor([[0, 0, 0, 1, 1, 1, 2]]).int()
# Two texts in the first of three rows.
ENDS = torch.tensor([0, 3, 7, 14, 21]).int()


SHOWING_SEVERAL_TEXTS = [
    pytest.param(
        "position_ids",
        RESTARTING.expand(3, 7),
        id="position_ids",
    ),
    pytest.param(
        "position_ids",
        RESTARTING[None],
        id="position_ids of all rows",
    ),
    pytest.param(
        "position_ids",
        OF_TEXT_AND_IMAGES[:, None],
        id="position_ids of text and images",
    ),
    pytest.param(
        "position_ids",
        RESTARTING.expand(3, 3, 7),
        id="position_ids of three axes",
    ),
    pytest.param(
        "attention_mask",
        NUMBERED.expand(3, 7),
        id="attention_mask",
    ),
    pytest.param(
        "attention_mask",
        NUMBERED_AND_PADDED.expand(3, 7),
        id="attention_mask of floats",
    ),
    pytest.param(
        "seq_idx",
        NUMBERED_FROM_0,
        id="seq_idx",
    ),
    pytest.param(
        "cu_seq_lens_q",
        ENDS,
        id="cu_seq_lens_q",
    ),
    pytest.param(
        "cu_seq_lens_k",
        ENDS,
        id="cu_seq_lens_k",
    ),
]
showing_several_texts = pytest.mark.parametrize(
    ("key", "numbers"),
    SHOWING_SEVERAL_TEXTS,
)


@showing_several_texts
def test_several_texts_in_a_row_are_refused_by_what_shows_them(key, numbers):
    (batch,) = ragged_batches(lengths=(7, 7, 7))
    packed = batch | {key: numbers}
    model = adapted("bert", pad=None)
    message = f"as {key} shows: give each text a row of its"
    with pytest.raises(NotImplementedError, match=message):
        model(packed)


@showing_several_texts
def test_several_embedded_texts_in_a_row_are_refused(key, numbers):
    (batch,) = ragged_batches(lengths=(7, 7, 7))
    packed = without(batch, "input_ids")
    packed["inputs_embeds"] = torch.randn(3, 7, 12).double()
    packed[key] = numbers
    model = adapted("gpt2", pad=None)
    with pytest.raises(NotImplementedError, match=f"as {key} shows"):
        model(packed)


# As transformers' `DataCollatorWithFlattening` makes them.
@pytest.mark.parametrize(
    ("key", "of_two", "of_one"),
    [
        (
            "position_ids",
            [[0, 1, 2, 0, 1]],
            [[0, 1, 2, 3, 4]],
        ),
        (
            "seq_idx",
            [[0, 0, 0, 1, 1]],
            [[0, 0, 0, 0, 0]],
        ),
        ("cu_seq_lens_q", [0, 3, 5], [0, 5]),
        ("cu_seq_lens_k", [0, 3, 5], [0, 5]),
    ],
)
def test_packed_texts_of_supervised_fine_tuning_are_refused_and_one_text_is_not(
    gpt2,
    key,
    of_two,
    of_one,
):
    model = TokensModel(gpt2)
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    whole = {
        "input_ids": tokens,
        key: torch.tensor(of_one),
    }
    check_texts(whole, model.transformer)
    packed = {
        "input_ids": tokens,
        "labels": tokens,
        key: torch.tensor(of_two),
    }
    with pytest.raises(NotImplementedError, match=f"as {key} shows"):
        model(packed)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            packed_with_a_mask_of_ones,
            "as position_ids shows",
        ),
        (
            without_a_mask,
            "no attention_mask, but the padding token 3",
        ),
        (
            tokens_alone,
            "pass the tokenizer's attention_mask",
        ),
        (
            with_an_empty_text,
            "Row 1 has no text",
        ),
        (
            of_no_tokens,
            "Row 0 has no text",
        ),
        (
            with_names_of_adapters,
            "adapter_names sends examples to other weights",
        ),
    ],
)
@pytest.mark.parametrize(("kind", "side"), [("bert", "right"), ("gpt2", "left")])
def test_what_a_model_would_read_in_another_way_is_refused(kind, side, change, message):
    model = adapted(kind)
    batch = padded_batch(side)
    changed = change(batch)
    refused = (ValueError, NotImplementedError)
    with pytest.raises(refused, match=message):
        model(changed)


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


def test_positions_that_restart_in_the_padding_are_not_refused():
    mask = torch.tensor([1, 1, 1, 1, 0, 0, 0])
    batch = padded_batch()
    batch["position_ids"] = RESTARTING.expand(3, 7)
    batch["attention_mask"] = mask.expand(3, 7)
    model = adapted("gpt2")
    model(batch)


def test_one_text_a_row_is_not_refused():
    batch = padded_batch()
    batch["cu_seq_lens_q"] = torch.tensor([0, 7, 14, 21])
    batch["seq_idx"] = torch.zeros(3, 7)
    model = adapted("gpt2")
    check_texts(batch, model.transformer)


def test_positions_of_an_image_are_not_refused():
    # Places in the text, and in time, rows and columns.
    axes = IN_ORDER.repeat(4, 3, 1)
    columns = torch.tensor([0, 1, 2, 1, 2, 3, 4])
    axes[2] = columns
    batch = padded_batch()
    batch["position_ids"] = axes
    model = adapted("gpt2")
    check_texts(batch, model.transformer)


def test_longformers_tokens_of_global_attention_are_not_refused():
    config = LongformerConfig(
        vocab_size=VOCABULARY,
        hidden_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = LongformerForSequenceClassification(config)
    batch = padded_batch()
    # What it calls a mask has a 2 for the tokens that all others see.
    batch["attention_mask"] = torch.tensor([[2, 1, 1, 1, 1, 0, 0]])
    check_texts(batch, model)


def test_a_padding_token_inside_of_a_text_is_not_refused():
    model = adapted("gpt2")
    (batch,) = ragged_batches(lengths=(7, 7))
    keep_padding_out_of_texts(batch)
    batch["input_ids"][0, 2] = PAD
    expected = model(batch)
    unmasked = without(batch, "attention_mask")
    assert torch.equal(model(unmasked), expected)


# --- padding on the left --------------------------------------------------------------


@pytest.fixture
def padded_left() -> Batch:
    (batch,) = ragged_batches(
        lengths=(4, 7, 5),
        padding_side="left",
    )
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
    more = {
        "decoder_x": of_decoder,
        "pixel_values": pixels,
    }
    moved = text_first(padded_left | more)
    assert moved["decoder_x"] is of_decoder
    assert moved["pixel_values"] is pixels


def mask_read(
    kind: str,
    batch: Batch,
) -> Tensor:
    """Take the mask that a transformer is given for a batch."""
    model = adapted(kind)
    transformer = model.model.base_model.model
    calls = record_calls(transformer)
    model(batch)
    (keywords,) = calls
    return keywords["attention_mask"]


def test_a_classifier_reads_texts_where_they_stand(padded_left):
    # How it pools is its own.
    found = mask_read("bert", padded_left)
    assert torch.equal(found, padded_left["attention_mask"])


def test_texts_with_positions_are_read_where_they_stand(padded_left):
    mask = padded_left["attention_mask"]
    running = mask.cumsum(1) - 1
    padded_left["position_ids"] = running.clamp_min(0)
    found = mask_read("gpt2", padded_left)
    assert torch.equal(found, mask)
