"""A batch in, logits of its classes out: batches, outputs, answers of causal language models."""

from __future__ import annotations

import functools
import warnings
from collections import UserDict, namedtuple
from collections.abc import Iterator, Mapping, MutableMapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from laplace import Laplace
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import (
    BatchEncoding,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    modeling_utils,
)

import laplace_lora_ext
from laplace_lora_ext.models.logits_model import LogitsModel
from tests.tiny_models import (
    CLASS_TOKEN_IDS,
    VOCABULARY,
    TwoLinear,
    base_model,
    laplace_keywords,
    lora_model,
    ragged_batches,
)


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


@pytest.fixture
def bert() -> nn.Module:
    return lora_model("bert").eval()


def quiet_laplace(model: nn.Module, **kwargs: Any):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The posterior is over")
        return Laplace(
            model,
            "classification",
            subset_of_weights="lora",
            hessian_structure="lowrank_kron",
            **kwargs,
        )


def record_calls(module: nn.Module) -> list[dict]:
    """Keyword arguments of each call of a module."""
    calls: list[dict] = []

    forward = module.forward

    @functools.wraps(forward)  # older PEFT calls `forward`, past all hooks
    def record(**kwargs: Any) -> Any:
        calls.append(kwargs)
        return forward(**kwargs)

    module.forward = record
    return calls


# --- batches -------------------------------------------------------------------------------------


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
        la = quiet_laplace(bert)
        la.fit([wrap(batch) for batch in ragged_batches()])
        evidences.append(la.log_marginal_likelihood())
    assert torch.equal(*evidences)


def test_a_pair_of_a_mapping_and_labels_gives_the_same_fit(bert):
    batches = ragged_batches()
    pairs = []
    for batch in batches:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        pairs.append((inputs, batch["labels"]))
    expected, actual = quiet_laplace(bert), quiet_laplace(bert)
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
    la = quiet_laplace(bert)
    la.fit(ragged_batches())
    la(ragged_batches()[0])
    la(ragged_batches()[0], pred_type="nn", link_approx="mc", n_samples=2)
    assert bert.config.problem_type is None


def test_class_labels_never_reach_a_causal_language_model():
    la = quiet_laplace(lora_model("gpt2"), class_token_ids=CLASS_TOKEN_IDS)
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

    expected, actual = quiet_laplace(bert), quiet_laplace(Wrapper())
    for la in (expected, actual):
        la.fit(ragged_batches())
    assert torch.equal(actual.log_marginal_likelihood(), expected.log_marginal_likelihood())


def test_keyword_arguments_are_passed_on_to_the_model():
    spy = Spy()
    LogitsModel(spy)(torch.zeros(3, 1), flag=1)
    assert spy.calls[0][1] == {"flag": 1}


# --- split ---------------------------------------------------------------------------------------


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


# --- outputs -------------------------------------------------------------------------------------

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
    with pytest.raises(ValueError, match=r"shape \(batch, outputs\) and got"):
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


def test_logits_of_a_bf16_model_are_those_of_the_model_in_float32():
    model = lora_model("gpt2", torch.bfloat16).eval()
    batch = ragged_batches(lengths=(5, 5))[0]
    logits = LogitsModel(model, CLASS_TOKEN_IDS)(batch)
    expected = model(input_ids=batch["input_ids"][:, :5]).logits[:, -1, CLASS_TOKEN_IDS]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected.float(), rtol=0.03, atol=0.03)


# --- causal language models ----------------------------------------------------------------------


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=12,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attn_implementation="eager",
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def causal_model(kind: str) -> nn.Module:
    # Llama's attention is not for float64: its softmax of a masked row is NaN there.
    return (llama() if kind == "llama" else lora_model(kind)).eval()


def single_sequence_logits(model: nn.Module, batch: Mapping) -> torch.Tensor:
    """Brute force: each row alone, without padding, all of the vocabulary at all positions."""
    rows = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        logits = model(input_ids=ids[mask.bool()][None], use_cache=False).logits
        assert logits.shape[1:] == (mask.sum(), VOCABULARY)
        rows.append(logits[0, -1, CLASS_TOKEN_IDS])
    return torch.stack(rows)


@pytest.mark.parametrize("padded_to", [7, 12])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama"])
def test_logits_are_those_after_the_last_real_token_of_the_unpadded_sequence(kind, side, padded_to):
    model = causal_model(kind)
    (batch,) = ragged_batches(batch_size=8, padding_side=side, padded_to=padded_to)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if kind == "llama" else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(
        LogitsModel(model, CLASS_TOKEN_IDS)(batch),
        single_sequence_logits(model, batch),
        **tolerance,
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64, torch.int32])
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_type_of_the_mask_does_not_matter(side, dtype):
    model = causal_model("gpt2")
    (batch,) = ragged_batches(batch_size=8, padding_side=side)
    expected = single_sequence_logits(model, batch)
    batch["attention_mask"] = batch["attention_mask"].to(dtype)
    torch.testing.assert_close(
        LogitsModel(model, CLASS_TOKEN_IDS)(batch), expected, rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox"])
def test_without_a_mask_the_last_token_is_the_last_position(kind):
    model = causal_model(kind)
    ids = ragged_batches(lengths=(6, 6, 6), padded_to=6)[0]["input_ids"]
    logits = LogitsModel(model, CLASS_TOKEN_IDS)({"input_ids": ids})
    expected = model(input_ids=ids).logits[:, -1, CLASS_TOKEN_IDS]
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


def test_input_embeddings_take_the_place_of_tokens():
    model = causal_model("gpt2")
    ids = ragged_batches(lengths=(6, 6, 6), padded_to=6)[0]["input_ids"]
    embeddings = model.get_input_embeddings()(ids).detach()
    logits = LogitsModel(model, CLASS_TOKEN_IDS)({"inputs_embeds": embeddings})
    expected = model(input_ids=ids).logits[:, -1, CLASS_TOKEN_IDS]
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


def test_a_tensor_of_tokens_gives_the_logits_of_the_mapping():
    model = causal_model("gpt2")
    ids = ragged_batches(lengths=(6, 6, 6), padded_to=6)[0]["input_ids"]
    adapted = LogitsModel(model, CLASS_TOKEN_IDS)
    assert torch.equal(adapted(ids), adapted({"input_ids": ids}))


def test_pairs_of_tokens_and_labels_fit_a_causal_language_model():
    la = quiet_laplace(lora_model("gpt2"), class_token_ids=CLASS_TOKEN_IDS)
    (batch,) = ragged_batches(lengths=(6, 6, 6), padded_to=6)
    la.fit([(batch["input_ids"], batch["labels"])])
    assert torch.isfinite(la.log_marginal_likelihood())


def test_positions_count_from_the_first_real_token_of_left_padding():
    model = causal_model("gpt2")
    calls = record_calls(model.base_model.model)
    (batch,) = ragged_batches(lengths=(2, 4), padded_to=4, padding_side="left")
    LogitsModel(model, CLASS_TOKEN_IDS)(batch)
    assert calls[0]["position_ids"].tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]


def test_right_padding_needs_no_positions():
    model = causal_model("gpt2")
    calls = record_calls(model.base_model.model)
    LogitsModel(model, CLASS_TOKEN_IDS)(ragged_batches()[0])
    assert calls[0].get("position_ids") is None


def test_positions_that_the_batch_has_are_kept():
    model = causal_model("gpt2")
    calls = record_calls(model.base_model.model)
    (batch,) = ragged_batches(lengths=(2, 4), padded_to=4, padding_side="left")
    batch["position_ids"] = torch.tensor([[5, 5, 5, 6], [5, 6, 7, 8]])
    LogitsModel(model, CLASS_TOKEN_IDS)(batch)
    assert torch.equal(calls[0]["position_ids"], batch["position_ids"])


def test_no_cache_and_logits_of_one_position_alone_are_asked_for():
    model = causal_model("gpt2")
    calls = record_calls(model.base_model.model)
    outputs: list[Any] = []
    model.register_forward_hook(lambda *args: outputs.append(args[-1]))
    LogitsModel(model, CLASS_TOKEN_IDS)(ragged_batches()[0])
    assert calls[0]["use_cache"] is False
    assert outputs[0].past_key_values is None
    # Older transformers keep the logits of the same positions for all rows: here, of all.
    n_positions = 1 if hasattr(modeling_utils, "slice_logits_to_keep") else 7
    assert outputs[0].logits.shape == (3, n_positions, VOCABULARY)


class Decoder(nn.Module):
    """A user's wrapper that returns logits at all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = causal_model("gpt_neox")

    def forward(self, batch: Mapping) -> torch.Tensor:
        return self.inner(**batch).logits


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_users_wrapper_may_return_logits_at_all_positions(side):
    model = Decoder()
    (batch,) = ragged_batches(batch_size=8, padding_side=side)
    torch.testing.assert_close(
        LogitsModel(model, CLASS_TOKEN_IDS)(batch),
        single_sequence_logits(model.inner, batch),
        rtol=1e-9,
        atol=1e-9,
    )


def test_class_tokens_need_logits_at_positions(bert):
    with pytest.raises(ValueError, match=r"\(batch, positions, vocabulary\), not \(3, 3\)"):
        LogitsModel(bert, [1, 2])(ragged_batches()[0])


# --- class_token_ids -----------------------------------------------------------------------------


def test_a_causal_language_model_needs_class_token_ids():
    with pytest.raises(ValueError, match="pass class_token_ids"):
        quiet_laplace(lora_model("gpt2"))


def test_a_causal_language_model_with_injected_adapter_needs_class_token_ids():
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = inject_adapter_in_model(config, base_model("gpt2"))
    with pytest.raises(ValueError, match="pass class_token_ids"):
        LogitsModel(model)


@pytest.mark.parametrize("ids", [[3, 3], [1, 2, 1], [1], []], ids=str)
def test_class_tokens_must_be_two_or_more_and_distinct(ids):
    with pytest.raises(ValueError, match="two or more distinct tokens"):
        LogitsModel(lora_model("gpt2"), ids)


@pytest.mark.parametrize("ids", [[1, VOCABULARY], [-1, 2]], ids=str)
def test_class_tokens_must_be_in_the_vocabulary(ids):
    with pytest.raises(ValueError, match="not all in the vocabulary"):
        LogitsModel(lora_model("gpt2"), ids)


def test_class_tokens_of_an_encoder_decoder_are_refused():
    config = T5Config(vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(NotImplementedError, match="causal language models only"):
        LogitsModel(T5ForConditionalGeneration(config), [1, 2])


@pytest.mark.parametrize("ids", [tuple(CLASS_TOKEN_IDS), torch.tensor(CLASS_TOKEN_IDS)], ids=type)
def test_class_tokens_may_be_any_sequence(ids):
    model = causal_model("gpt2")
    batch = ragged_batches()[0]
    assert torch.equal(LogitsModel(model, ids)(batch), LogitsModel(model, CLASS_TOKEN_IDS)(batch))


def test_classes_follow_the_order_of_the_class_tokens():
    model = causal_model("gpt2")
    batch = ragged_batches()[0]
    logits = LogitsModel(model, CLASS_TOKEN_IDS)(batch)
    assert torch.equal(LogitsModel(model, CLASS_TOKEN_IDS[::-1])(batch), logits.flip(-1))


# --- the likelihood that a model implies ---------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings", "likelihood"),
    [
        ("bert", {}, "classification"),
        ("bert", {"n_labels": 1}, "regression"),
        ("gpt2", {}, "classification"),
    ],
)
def test_the_factory_reads_the_likelihood_off_the_model(kind, settings, likelihood):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The posterior is over")
        la = laplace_lora_ext.Laplace(
            lora_model(kind, **settings),
            subset_of_weights="lora",
            hessian_structure="lowrank_kron",
            **laplace_keywords(kind),
        )
    assert la.likelihood == likelihood


def test_the_factory_refuses_to_guess_the_likelihood_of_a_plain_module():
    with pytest.raises(ValueError, match="Name the likelihood"):
        laplace_lora_ext.Laplace(TwoLinear(), subset_of_weights="lora")


def test_the_factory_asks_for_class_tokens_of_a_language_model():
    with pytest.raises(ValueError, match="class_token_ids"):
        laplace_lora_ext.Laplace(lora_model("gpt2"), subset_of_weights="lora")
