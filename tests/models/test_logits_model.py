"""A batch in, logits of its classes out: batches, labels, outputs."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Iterator, Mapping, MutableMapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftMixedModel
from torch import nn
from transformers import (
    BatchEncoding,
)

from laplace_lora_ext.models.logits_model import LogitsModel
from tests.support.models import (
    CLASS_TOKEN_IDS,
    TwoLinear,
    base_model,
    lora_model,
    pairs,
    ragged_batches,
    record_calls,
    with_lora,
)
from tests.support.posteriors import STRUCTURES, make


class Custom(MutableMapping):
    """A mapping whose shallow copy shares its contents."""

    def __init__(self, contents: dict) -> None:
        self.contents = contents

    def __getitem__(self, key: str) -> Any:
        return self.contents[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.contents[key] = value

    def __delitem__(self, key: str) -> None:
        del self.contents[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.contents)

    def __len__(self) -> int:
        return len(self.contents)


MAPPINGS = [dict, UserDict, BatchEncoding, Custom, lambda d: MappingProxyType(dict(d))]


MAPPING_NAMES = ["dict", "UserDict", "BatchEncoding", "MutableMapping", "Mapping"]


class Spy(nn.Module):
    """Keeps what it is called with, and returns what it is told to."""

    def __init__(self, output: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.output = torch.zeros(3, 2) if output is None else output
        self.calls: list[tuple[tuple, dict]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return self.output


@pytest.mark.parametrize("mapping", MAPPINGS, ids=MAPPING_NAMES)
def test_every_mapping_gives_the_logits_of_the_model(bert, mapping):
    batch = ragged_batches()[0]
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    assert torch.equal(LogitsModel(bert)(mapping(batch)), bert(**inputs).logits)


@pytest.mark.parametrize("mapping", MAPPINGS, ids=MAPPING_NAMES)
def test_a_batch_is_left_as_it_was(bert, mapping):
    batch = mapping(dict(ragged_batches()[0]))
    before = dict(batch)
    LogitsModel(bert)(batch)
    assert dict(batch) == before  # the same tensor objects
    assert list(batch) == list(before)


@pytest.mark.parametrize("mapping", MAPPINGS, ids=MAPPING_NAMES)
def test_every_mapping_gives_the_same_fit(bert, mapping):
    evidences = []
    for wrap in (dict, mapping):
        la = make(bert)
        la.fit([wrap(batch) for batch in ragged_batches()])
        evidences.append(la.log_marginal_likelihood())
    assert torch.equal(*evidences)


def test_a_pair_of_a_mapping_and_labels_gives_the_same_fit(bert):
    batches = ragged_batches()
    pairs = []
    for batch in batches:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        pairs.append((inputs, batch["labels"]))
    expected, actual = make(bert), make(bert)
    expected.fit(batches)
    actual.fit(pairs)
    assert torch.equal(actual.log_marginal_likelihood(), expected.log_marginal_likelihood())


@pytest.mark.parametrize("key", ["label", "labels", "answer"])
def test_labels_never_reach_the_model(bert, key):
    batch = ragged_batches()[0]
    batch[key] = batch.pop("labels")
    calls = record_calls(bert.base_model.model)
    LogitsModel(bert, dict_key_y=key)(batch)
    assert len(calls) == 1
    assert {"label", "labels", "answer"}.isdisjoint(k for k, v in calls[0].items() if v is not None)
    assert calls[0]["input_ids"] is not None


def test_fit_and_predictions_leave_the_problem_type_of_the_configuration(bert):
    assert bert.config.problem_type is None
    la = make(bert)
    la.fit(ragged_batches())
    la(ragged_batches()[0])
    la(ragged_batches()[0], pred_type="nn", link_approx="mc", n_samples=2)
    assert bert.config.problem_type is None


def test_class_labels_never_reach_a_causal_language_model():
    la = make(lora_model("gpt2"), class_token_ids=CLASS_TOKEN_IDS)
    la.fit(ragged_batches())  # transformers raises on labels of this shape
    assert la.n_data == 8


def test_a_tensor_is_passed_to_a_plain_module_as_it_is():
    model, X = TwoLinear().double(), torch.randn(4, 5).double()
    assert torch.equal(LogitsModel(model)(X), model(X))


@pytest.mark.parametrize("mapping", [dict, UserDict, BatchEncoding])
def test_a_users_wrapper_gets_the_mapping_itself_without_labels(mapping):
    wrapper = Spy()
    batch = mapping({"input_ids": torch.ones(3, 2), "labels": torch.ones(3), "words": ["a"] * 3})
    LogitsModel(wrapper)(batch)
    ((inputs,), kwargs) = wrapper.calls[0]
    assert isinstance(inputs, mapping)
    assert list(inputs) == ["input_ids", "words"]
    assert not kwargs


def test_a_users_wrapper_around_a_transformer_is_fitted_as_the_transformer(bert):
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = bert

        def forward(self, batch: Mapping) -> torch.Tensor:
            assert "labels" not in batch
            return self.inner(**batch).logits

    expected, actual = make(bert), make(Wrapper())
    for la in (expected, actual):
        la.fit(ragged_batches())
    assert torch.equal(actual.log_marginal_likelihood(), expected.log_marginal_likelihood())


def test_keyword_arguments_are_passed_on_to_the_model():
    spy = Spy()
    LogitsModel(spy)(torch.zeros(3, 1), flag=1)
    assert spy.calls[0][1] == {"flag": 1}


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.zeros(2, 1), "labels": torch.tensor([0, 1])},
        (torch.zeros(2, 1), torch.tensor([0, 1])),
        [torch.zeros(2, 1), [0, 1]],
    ],
    ids=["mapping", "tuple", "list"],
)
def test_split_gives_inputs_and_labels(batch):
    X, y = LogitsModel(Spy()).split(batch)
    assert torch.equal(X["x"] if isinstance(X, Mapping) else X, torch.zeros(2, 1))
    assert y.tolist() == [0, 1]


def test_split_reads_the_named_key():
    _, y = LogitsModel(Spy(), dict_key_y="answer").split({"answer": torch.tensor([1])})
    assert y.tolist() == [1]


def test_split_without_labels_names_the_keys_there_are_and_the_keyword():
    with pytest.raises(ValueError, match=r"No labels 'labels'.*\['a', 'b'\].*dict_key_y"):
        LogitsModel(Spy()).split({"b": 0, "a": 0})


@pytest.mark.parametrize("batch", [torch.zeros(2), "text", (1,), (1, 2, 3), None, {1, 2}], ids=repr)
def test_split_refuses_what_is_neither_a_mapping_nor_a_pair(batch):
    with pytest.raises(TypeError, match=rf"pair \(X, y\), not {type(batch).__name__}"):
        LogitsModel(Spy()).split(batch)


@pytest.mark.parametrize("labels", [["yes", "no"], None], ids=repr)
def test_split_refuses_labels_that_are_no_numbers(labels):
    with pytest.raises(ValueError, match=f"must be numbers, not {type(labels).__name__}"):
        LogitsModel(Spy()).split((torch.zeros(2, 1), labels))


def test_split_refuses_a_single_label():
    with pytest.raises(ValueError, match="not the single number 1: give examples as batches"):
        LogitsModel(Spy()).split({"x": torch.zeros(1, 1), "labels": torch.tensor(1)})


def test_examples_may_share_a_mask(bert):
    model, (batch,) = LogitsModel(bert), ragged_batches((4, 4), padded_to=6)
    shared = batch | {"attention_mask": batch["attention_mask"][:1]}
    found, expected = model.positions(shared, 2), model.positions(batch, 2)
    assert found[:3] == expected[:3]
    assert torch.equal(found.mask, expected.mask)


def additive(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("as_scores", [torch.Tensor.bool, torch.Tensor.long, additive])
def test_masks_of_what_tokens_attend_to_give_positions_as_far_as_they_show_padding(bert, as_scores):
    model, batch = LogitsModel(bert), ragged_batches()[0]
    expected = model.positions(batch, len(batch["input_ids"]))
    allowed = batch["attention_mask"].bool()[:, None, None, :]
    found = model.positions(batch | {"attention_mask": as_scores(allowed)}, len(allowed))
    assert found[:3] == expected[:3]
    assert torch.equal(found.mask, expected.mask)
    length = allowed.shape[-1]
    causal = torch.ones(length, length).tril().bool()
    everything = as_scores(torch.ones(len(allowed), 1, length, length).bool())
    assert model.positions(batch | {"attention_mask": everything}, len(allowed)).mask is None
    for pattern in (allowed & causal, causal[None, None]):
        found = model.positions(batch | {"attention_mask": as_scores(pattern)}, len(allowed))
        assert found[:3] == expected[:3]
        with pytest.raises(NotImplementedError, match="needs no mask"):
            found.valid(length)


LOGITS = torch.arange(6.0).reshape(3, 2)


Output = namedtuple("Output", ["logits", "hidden_states"])


@pytest.mark.parametrize(
    "output",
    [
        LOGITS,
        (LOGITS, "more"),
        [LOGITS],
        SimpleNamespace(logits=LOGITS),
        SimpleNamespace(logits=(LOGITS, "more")),
        Output(logits=LOGITS, hidden_states=()),
    ],
    ids=["tensor", "tuple", "list", "attribute", "attribute with a tuple", "named tuple"],
)
def test_logits_are_read_off_the_output(output):
    assert torch.equal(LogitsModel(Spy(output))(torch.zeros(3, 1)), LOGITS)


@pytest.mark.parametrize(
    "output", [(), [], "text", {"scores": LOGITS}, ("text", LOGITS), 1.0], ids=repr
)
def test_any_other_output_is_refused(output):
    with pytest.raises(TypeError, match=r"must return logits"):
        LogitsModel(Spy(output))(torch.zeros(3, 1))


@pytest.mark.parametrize("shape", [(3,), (3, 4, 2), ()])
def test_logits_that_are_not_one_row_an_example_are_refused(shape):
    with pytest.raises(ValueError, match=r"shape \(batch, outputs\), not"):
        LogitsModel(Spy(torch.zeros(shape)))(torch.zeros(3, 1))


def test_output_size_is_known_after_the_first_call():
    model = LogitsModel(Spy())
    model(torch.zeros(3, 1))
    assert model.output_size == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_are_returned_in_float32(dtype):
    assert LogitsModel(Spy(LOGITS.to(dtype)))(torch.zeros(3, 1)).dtype == torch.float32


def test_float64_logits_stay_float64():
    assert LogitsModel(Spy(LOGITS.double()))(torch.zeros(3, 1)).dtype == torch.float64


@pytest.mark.parametrize("structure", STRUCTURES)
def test_missing_labels_are_refused_by_batch_and_say_which_keys_there_are(structure):
    la, batches = make(lora_model("bert"), structure), ragged_batches()
    del batches[1]["labels"]
    with pytest.raises(
        ValueError, match=r"batch 1: No labels 'labels'.*attention_mask.*input_ids.*dict_key_y"
    ):
        la.fit(batches)


def test_labels_under_another_key_are_found_by_dict_key_y():
    batches = [{**b, "answer": b["labels"]} for b in ragged_batches()]
    for batch in batches:
        del batch["labels"]
    la = make(lora_model("bert"), dict_key_y="answer")
    la.fit(batches)
    assert la.n_data == 8


def test_a_mixed_model_is_refused():
    model = PeftMixedModel(base_model("bert"), LoraConfig(r=2, target_modules=["query"]))
    with pytest.raises(NotImplementedError, match=r"PeftMixedModel.*as a PeftModel"):
        make(model)


class Scripted(TwoLinear):
    """Its inputs pass a compiled script first."""

    def __init__(self) -> None:
        super().__init__()
        self.script = torch.jit.script(nn.Linear(5, 5))

    def forward(self, x):
        return super().forward(self.script(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_a_part_of_a_model_may_be_a_script():
    model = with_lora(Scripted(), "first", "second").train()
    model.script.weight.requires_grad_(True)
    make(model).fit(pairs())
    assert model.script.training
    assert model.script.weight.requires_grad
