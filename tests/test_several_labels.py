"""Labels of tokens, and several labels, by exact wrappers."""

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
)
from torch.testing import assert_close
from transformers import BertForTokenClassification

import laplace_lora_ext
from tests.support.dense import EXACT, assert_exact
from tests.support.models import (
    N_CLASSES,
    OfMapping,
    base_model,
    lora_model,
    pairs,
    plain_model,
    ragged_batches,
    real_targets,
)
from tests.support.posteriors import make

RANK = {"backend_kwargs": {"rank": 200}}
MULTI_LABEL = '"multi_label_classification"'


class InTwoColumns(nn.Module):
    """Makes rows [0, f] of each logit f, whose softmax is f's sigmoid."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        f = self.model(**batch).logits
        return torch.stack([torch.zeros_like(f), f], -1).flatten(0, 1)


def inputs_of(
    batch: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    return {key: value for key, value in batch.items() if key != "labels"}


def several_labels(
    batch: Mapping[str, torch.Tensor],
    n_labels: int,
) -> torch.Tensor:
    """`(B, C)` numbers 0 and 1."""
    generator = torch.Generator().manual_seed(4)
    shape = len(batch["input_ids"]), n_labels
    return torch.randint(0, 2, shape, generator=generator).double()


@pytest.mark.parametrize("n_labels", [1, 3])
@pytest.mark.parametrize("structure", ["lowrank_kron", "full"])
def test_two_columns_for_each_logit_make_sigmoids_exact(structure, n_labels):
    """One logit for two classes, and several labels for each example."""
    plain = lora_model("bert", n_labels=n_labels).eval()
    model = OfMapping(InTwoColumns(plain)).eval()
    (batch,) = ragged_batches(lengths=(7, 4, 5), padded_to=7)
    X = inputs_of(batch)
    labels = several_labels(batch, n_labels)
    la = make(
        model,
        structure,
        **(RANK if structure == "lowrank_kron" else {}),
    )
    la.fit([(X, labels.long().flatten())])
    logits = plain(**X).logits.detach()
    loss = binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    assert_close(la.loss, loss, **EXACT)
    assert_exact(la, model, [X])
    la.prior_precision = 1e12
    probabilities = la(X)[:, 1].reshape(logits.shape)
    assert_close(probabilities, logits.sigmoid(), rtol=1e-6, atol=1e-6)


class OfTokens(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        texts = {key: value for key, value in batch.items() if key != "labelled"}
        return self.model(**texts).logits[batch["labelled"]]


def token_classifier() -> nn.Module:
    torch.manual_seed(0)
    config: Any = base_model("bert").config
    lora = LoraConfig(
        r=2,
        target_modules=["query", "value"],
        init_lora_weights=False,
    )
    return get_peft_model(BertForTokenClassification(config), lora).double().eval()


@pytest.mark.parametrize("structure", ["lowrank_kron", "full"])
def test_rows_of_labelled_tokens_make_token_classification_exact(
    structure,
):
    plain = token_classifier()
    model = OfMapping(OfTokens(plain)).eval()
    (batch,) = ragged_batches(lengths=(7, 4, 5), padded_to=7)
    X = inputs_of(batch) | {"labelled": batch["attention_mask"].bool()}
    X["labelled"][1] = False  # a text without labels
    y = torch.arange(12) % N_CLASSES
    la = make(
        model,
        structure,
        **(RANK if structure == "lowrank_kron" else {}),
    )
    la.fit([(X, y)])
    expected = cross_entropy(
        plain(**inputs_of(batch)).logits[X["labelled"]],
        y,
        reduction="sum",
    )
    assert_close(la.loss, expected.detach(), **EXACT)
    assert_exact(la, model, [X])


# --- without a wrapper ----------------------------------------------------------------


def test_token_classification_is_told_of_its_likelihood():
    (batch, *_) = ragged_batches()
    with pytest.raises(
        ValueError,
        match=r"batch 0: .*\(3, 7, 3\).*tokens.*\"token_classification\"",
    ):
        make(token_classifier()).fit([batch])


@pytest.mark.parametrize("structure", ["lowrank_kron", "kron"])
@pytest.mark.parametrize("dtype", [torch.long, torch.float32, torch.bool])
def test_multi_hot_labels_are_told_of_their_likelihood(structure, dtype):
    X, _ = pairs()[0]
    y = torch.tensor([[0, 1, 1], [0, 0, 0], [1, 1, 1], [1, 0, 0]]).to(dtype)
    with pytest.raises(
        ValueError,
        match=rf"batch 0: .*of {dtype}: several labels .* {MULTI_LABEL}",
    ):
        make(plain_model(), structure).fit([(X, y)])
    of_numbers = r"not \(4, 3\) of torch\.float64: numbers .* \"regression\"$"
    with pytest.raises(ValueError, match=of_numbers):
        make(plain_model(), structure).fit([(X, torch.full((4, 3), 0.5).double())])


def test_a_multi_label_classifier_is_not_fitted_with_a_softmax():
    model = lora_model("bert")
    model.config.problem_type = "multi_label_classification"
    with pytest.raises(ValueError, match=MULTI_LABEL):
        laplace_lora_ext.Laplace(model, "classification")
    assert laplace_lora_ext.Laplace(model).likelihood == "multi_label_classification"
    make(OfMapping(InTwoColumns(model))).fit(
        [
            (inputs_of(b), several_labels(b, 3).long().flatten())
            for b in ragged_batches()
        ]
    )
    model.config.problem_type = "single_label_classification"
    make(model).fit(ragged_batches())
    with pytest.raises(ValueError, match='"multi_label_classification" does not fit'):
        make(model, likelihood="multi_label_classification")


@pytest.mark.parametrize("dtype", [torch.long, torch.float64])
def test_one_logit_of_two_classes_is_warned_of_once_after_a_fit(
    dtype,
):
    model = lora_model("bert", n_labels=1)
    batches = ragged_batches(n_classes=2)
    for batch in batches:
        batch["labels"] = batch["labels"].to(dtype)
    la = laplace_lora_ext.Laplace(model)
    assert la.likelihood == "regression"
    with pytest.warns(
        UserWarning,
        match=f"Every target is 0 or 1.*{MULTI_LABEL}",
    ) as caught:
        la.fit(batches)
    assert len([w for w in caught if "Every target" in str(w.message)]) == 1
    with pytest.raises(
        ValueError,
        match=f"at least two outputs.*{MULTI_LABEL}",
    ):
        make(model).fit(batches)


@pytest.mark.parametrize("structure", ["lowrank_kron", "kron"])
def test_numbers_are_not_taken_for_classes(structure):
    la = make(plain_model(2), structure, "regression")
    X = pairs()[0][0]
    numbers = real_targets()
    binary = torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0]])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Every target")
        la.fit([(X, binary), (X, numbers)])
    with pytest.warns(UserWarning, match="Every target is 0 or 1"):
        la.fit([(X, binary)])
