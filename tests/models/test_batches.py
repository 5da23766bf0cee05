"""Batches as people have them: without masks, as lists, packed, empty."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BatchEncoding
from transformers.utils.generic import ModelOutput

from laplace_lora_ext.models.batches import find_padding, named_batches
from laplace_lora_ext.models.logits_model import LogitsModel
from tests.support.models import CLASS_TOKEN_IDS, lora_model, plain_model, ragged_batches
from tests.support.posteriors import STRUCTURES, fitted, make

PAD = 3


def padded_model(kind: str) -> nn.Module:
    model = lora_model(kind)
    model.config.pad_token_id = PAD
    return model.eval()


def adapted(kind: str) -> LogitsModel:
    return LogitsModel(padded_model(kind), None if kind == "bert" else CLASS_TOKEN_IDS)


def padded_batch(side: str = "right") -> dict[str, torch.Tensor]:
    """A batch with its mask, whose texts don't hold the padding token."""
    (batch,) = ragged_batches(lengths=(4, 7, 5), padding_side=side)
    ids = batch["input_ids"]
    ids[ids == PAD] += 1
    ids[batch["attention_mask"] == 0] = PAD
    return batch


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_mask_that_is_missing_is_read_off_the_padding_tokens(kind, side):
    model, batch = adapted(kind), padded_batch(side)
    expected = model(batch)
    del batch["attention_mask"]
    with pytest.warns(UserWarning, match="no attention_mask: tokens 3 at the ends"):
        logits = model(batch)
    assert torch.equal(logits, expected)
    with pytest.warns(UserWarning, match="no attention_mask"):
        assert torch.equal(model(batch["input_ids"]), expected)
    assert "attention_mask" not in batch


def test_curvature_and_predictions_leave_out_padding_that_has_no_mask():
    batch = padded_batch()
    la = fitted(model=padded_model("bert"), batches=[batch], kfac_approx="expand")
    expected = la.predictive_moments(batch)
    del batch["attention_mask"]
    with pytest.warns(UserWarning, match="no attention_mask"):
        la.fit([batch])
    with pytest.warns(UserWarning, match="no attention_mask"):
        moments = la.predictive_moments(batch)
    torch.testing.assert_close(moments, expected, rtol=1e-12, atol=0)


def test_padding_that_cannot_be_told_from_text_is_refused():
    model, batch = adapted("gpt2"), padded_batch()
    del batch["attention_mask"]
    batch["input_ids"][1, 2] = PAD
    with pytest.raises(
        ValueError, match=r"token 3 also occurs within a row.*Pass the .*attention_mask"
    ):
        model(batch)


def test_texts_without_padding_need_no_mask():
    model = adapted("gpt2")
    (batch,) = ragged_batches(lengths=(7, 7))
    batch["input_ids"][batch["input_ids"] == PAD] += 1
    batch["input_ids"][0, 2] = PAD  # inside of a text, where nothing looks padded
    expected = model(batch)
    del batch["attention_mask"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(model(batch), expected)


def test_padding_of_pairs_of_texts():
    ids = torch.tensor([[[5, 6, PAD], [5, 6, 7]]])
    with pytest.warns(UserWarning, match="no attention_mask"):
        mask = find_padding(ids, PAD)
    assert mask.tolist() == [[[1, 1, 0], [1, 1, 1]]]


@pytest.mark.parametrize(
    "convert",
    [
        lambda batch: {key: value.tolist() for key, value in batch.items()},
        lambda batch: {key: value.numpy() for key, value in batch.items()},
        lambda batch: BatchEncoding({key: value.tolist() for key, value in batch.items()}),
    ],
    ids=["lists", "arrays", "encoding of lists"],
)
def test_lists_and_arrays_are_tensors_for_a_transformers_model(convert):
    batch = padded_batch()
    la = fitted(model=padded_model("bert"), batches=[batch])
    expected = la.predictive_moments(batch)
    converted = convert(batch)
    before = {key: type(value) for key, value in converted.items()}
    la.fit([converted])
    assert torch.equal(la.predictive_moments(converted).f_var, expected.f_var)
    assert {key: type(value) for key, value in converted.items()} == before


def test_an_array_is_a_tensor_for_any_model():
    X = torch.randn(4, 5).double()
    la = fitted(model=plain_model(), batches=[(X.numpy(), np.arange(4) % 3)])
    assert torch.equal(la.predictive_moments(X.numpy()).f_var, la.predictive_moments(X).f_var)


def test_what_a_users_module_takes_is_not_converted():
    taken = []

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = plain_model()

        def forward(self, batch: dict) -> torch.Tensor:
            taken.append(batch["lengths"])
            return self.inner(batch["x"])

    LogitsModel(Wrapper())({"x": torch.randn(2, 5).double(), "lengths": [3, 4]})
    assert taken == [[3, 4]]


@pytest.mark.parametrize("key", ["logits_to_keep", "num_logits_to_keep"])
def test_logits_of_certain_positions_are_not_asked_for_by_a_batch(key):
    with pytest.raises(ValueError, match=f"Leave {key} out of the batch"):
        adapted("gpt2")(padded_batch() | {key: 1})


def test_packed_texts_are_refused():
    model, batch = adapted("gpt2"), padded_batch()
    batch["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6], [0] * 7])
    model(batch)  # padding may have any position
    batch["position_ids"][1, 4:] = torch.arange(3)
    with pytest.raises(NotImplementedError, match=r"packed into one row, as position_ids shows"):
        model(batch)
    with pytest.raises(NotImplementedError, match=r"packed into one row, as cu_seq_lens_q shows"):
        model(padded_batch() | {"cu_seq_lens_q": torch.tensor([0, 3, 7])})


@pytest.mark.parametrize("structure", STRUCTURES)
def test_empty_batches_are_left_out(structure):
    batches = ragged_batches()
    empty = {key: value[:0] for key, value in batches[0].items()}
    la = fitted(batches=batches, structure=structure)
    evidence = la.log_marginal_likelihood()
    with_empty = [empty, *batches, empty]
    la.fit(with_empty)
    assert torch.equal(la.log_marginal_likelihood(), evidence)
    la.optimize_prior_precision(method="agreement", train_loader=with_empty)
    la.optimize_prior_precision(method="gridsearch", val_loader=with_empty, grid_size=3)


def test_batches_keep_their_numbers():
    X = torch.randn(2, 3)
    loader = [(X, X), (X[:0], X[:0]), X[:0], {"x": X[:0], "y": 3}, {"x": [1]}, ({"x": X}, X)]
    assert [name for name, _ in named_batches(loader)] == ["batch 0", "batch 4", "batch 5"]


def test_options_in_a_batch_reach_the_model_as_they_are():
    model, (batch, *_) = LogitsModel(lora_model("bert").eval()), ragged_batches()
    options = {"output_hidden_states": True, "return_dict": False}
    assert torch.equal(model(batch | options), model(batch))


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_texts_without_tokens_are_refused(kind):
    model, (batch, *_) = adapted(kind), ragged_batches()
    empty = {key: value[:, :0] for key, value in batch.items() if value.ndim == 2}
    with pytest.raises(ValueError, match="texts have no tokens"):
        model(empty)


def test_an_answer_is_not_read_after_padding_alone():
    model, (batch, *_) = adapted("gpt2"), ragged_batches()
    batch["attention_mask"][1] = 0
    with pytest.raises(ValueError, match="Row 1 has no text"):
        model(batch)


def test_an_answer_needs_a_mask_that_has_an_end():
    model, (batch, *_) = adapted("gpt2"), ragged_batches()
    batch["attention_mask"] = batch["attention_mask"][:, None, None]
    with pytest.raises(ValueError, match=r"\(texts, positions\), not \(3, 1, 1, 7\)"):
        model(batch)


@dataclass
class Output(ModelOutput):
    """A batch that lets go of no key."""

    input_ids: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    labels: torch.Tensor | None = None


def test_a_batch_may_be_an_output_of_a_model():
    batches = ragged_batches()
    la, expected = fitted(batches=[Output(**batch) for batch in batches]), fitted(batches=batches)
    assert la.log_marginal_likelihood() == expected.log_marginal_likelihood()
    assert torch.equal(la(Output(**batches[0])), expected(batches[0]))


@pytest.mark.parametrize("key", ["input_ids", "attention_mask"])
@pytest.mark.parametrize(
    ("convert", "form"),
    [
        (list, "a list of Tensor"),
        (lambda ids: [row.numpy() for row in ids], "a list of ndarray"),
        (lambda ids: ("a b", "c", "d"), "a tuple of str"),
        (lambda ids: [], "empty"),
        (lambda ids: ids.to_sparse(), "of layout torch.sparse_coo"),
        (lambda ids: torch.nested.nested_tensor(list(ids), layout=torch.jagged), "a nested tensor"),
        (lambda ids: ids[0], r"of shape \(7,\)"),
    ],
)
def test_rows_that_no_model_reads_are_named(convert, form, key):
    la, (batch, *_) = make(lora_model("bert")), ragged_batches()
    with pytest.raises(ValueError, match=f"^batch 0: {key} must be a dense tensor .* not {form}"):
        la.fit([batch | {key: convert(batch[key])}])


def test_rows_of_unequal_lengths_are_named():
    la = make(lora_model("bert"))
    with pytest.raises(ValueError, match=r"^batch 0: The rows of input_ids are not equally long"):
        la.fit([{"input_ids": [[5, 6, 7], [8]], "labels": torch.tensor([0, 1])}])
