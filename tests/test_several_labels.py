"""Labels of tokens, and several labels, by exact wrappers."""

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
)
from torch.testing import assert_close
from transformers import BertForTokenClassification

import laplace_lora_ext
from tests.support.dense import (
    EXACT,
    assert_exact,
    full_rank,
)
from tests.support.labels import (
    LABELS,
    InTwoColumns,
    in_two_classes,
    several_labels,
)
from tests.support.models import (
    N_CLASSES,
    Batch,
    OfMapping,
    base_model,
    first_batch,
    lora_model,
    pairs,
    plain_model,
    ragged_batches,
    real_targets,
    without_labels,
)
from tests.support.posteriors import make

# As messages name it, in quotes.
MULTI_LABEL = '"multi_label_classification"'

exact_structures = pytest.mark.parametrize("structure", ["lowrank_kron", "full"])
# One of ours, and one of the host's own.
ours_and_the_hosts = pytest.mark.parametrize("structure", ["lowrank_kron", "kron"])


def three_texts() -> Batch:
    """Make one batch of texts, of which two are padded."""
    (batch,) = ragged_batches(lengths=(7, 4, 5))
    return batch


def four_inputs() -> Tensor:
    (batch,) = pairs()
    X, _ = batch
    return X


def empty(model: nn.Module, structure: str):
    """Make a posterior that is not fitted yet, and has all columns of factors."""
    settings = full_rank(structure)
    return make(model, structure, **settings)


@pytest.mark.parametrize("n_labels", [1, 3])
@exact_structures
def test_two_columns_for_each_logit_make_sigmoids_exact(structure, n_labels):
    """One logit for two classes, and several labels for each example."""
    plain = lora_model("bert", n_labels=n_labels)
    model = OfMapping(InTwoColumns(plain))
    model.eval()
    texts = three_texts()
    labels = several_labels(texts, n_labels)
    la = empty(model, structure)
    labelled = texts | {"labels": labels}
    la.fit(in_two_classes([labelled]))

    X = without_labels(texts)
    output = plain(**X)
    logits = output.logits.detach()
    loss = binary_cross_entropy_with_logits(
        logits,
        labels,
        reduction="sum",
    )
    assert_close(la.loss, loss, **EXACT)
    assert_exact(la, model, [X])
    # So narrow a prior leaves the model alone.
    la.prior_precision = 1e12
    p = la(X)
    of_yes = p[:, 1]
    found = of_yes.reshape(logits.shape)
    expected = logits.sigmoid()
    assert_close(found, expected, rtol=1e-6, atol=1e-6)


class OfTokens(nn.Module):
    """Takes the logits of labelled tokens, text by text, for a batch's examples."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        texts = dict(batch)
        is_labelled = texts.pop("is_labelled")
        output = self.model(**texts)
        return output.logits[is_labelled]


def token_classifier() -> nn.Module:
    torch.manual_seed(0)
    config: Any = base_model("bert").config
    lora = LoraConfig(
        r=2,
        target_modules=["query", "value"],
        # With B at 0, as PEFT begins, the gradient of A would be 0 everywhere.
        init_lora_weights=False,
    )
    base = BertForTokenClassification(config)
    model = get_peft_model(base, lora)
    return model.double().eval()


@exact_structures
def test_rows_of_labelled_tokens_make_token_classification_exact(structure):
    plain = token_classifier()
    model = OfMapping(OfTokens(plain))
    model.eval()
    texts = without_labels(three_texts())
    is_labelled = texts["attention_mask"].bool()
    # A text without labels.
    is_labelled[1] = False
    X = texts | {"is_labelled": is_labelled}
    # All tokens of the first text and of the last.
    n_labelled = 7 + 5
    y = torch.arange(n_labelled) % N_CLASSES
    la = empty(model, structure)
    la.fit([(X, y)])

    output = plain(**texts)
    logits = output.logits[is_labelled].detach()
    loss = cross_entropy(logits, y, reduction="sum")
    assert_close(la.loss, loss, **EXACT)
    assert_exact(la, model, [X])


# --- without a wrapper ----------------------------------------------------------------


def test_token_classification_is_told_of_its_likelihood():
    la = make(token_classifier())
    batch = first_batch()
    message = r"batch 0: .*\(3, 7, 3\).*tokens.*\"token_classification\""
    with pytest.raises(ValueError, match=message):
        la.fit([batch])


@ours_and_the_hosts
@pytest.mark.parametrize(
    "dtype",
    [torch.long, torch.float32, torch.bool],
)
def test_multi_hot_labels_are_told_of_their_likelihood(structure, dtype):
    y = LABELS.to(dtype)
    batch = (four_inputs(), y)
    la = make(plain_model(), structure)
    message = rf"batch 0: .*of {dtype}: several labels .* {MULTI_LABEL}"
    with pytest.raises(ValueError, match=message):
        la.fit([batch])


@ours_and_the_hosts
def test_numbers_are_told_of_their_likelihood(structure):
    # Of the shape of several labels, and neither 0 nor 1.
    y = LABELS.double() + 0.5
    batch = (four_inputs(), y)
    la = make(plain_model(), structure)
    message = r"not \(4, 3\) of torch\.float64: numbers .* \"regression\"$"
    with pytest.raises(ValueError, match=message):
        la.fit([batch])


@pytest.fixture
def multi_label_classifier() -> nn.Module:
    model = lora_model("bert")
    model.config.problem_type = "multi_label_classification"
    return model


def test_a_multi_label_classifier_tells_its_likelihood(multi_label_classifier):
    la = laplace_lora_ext.Laplace(multi_label_classifier)
    assert la.likelihood == "multi_label_classification"


def test_a_multi_label_classifier_is_not_fitted_with_a_softmax(multi_label_classifier):
    with pytest.raises(ValueError, match=MULTI_LABEL):
        laplace_lora_ext.Laplace(multi_label_classifier, "classification")


def test_a_wrappers_logits_are_classes_whatever_its_model_is_for(
    multi_label_classifier,
):
    batches = ragged_batches()
    for batch in batches:
        batch["labels"] = several_labels(batch, 3)
    # Its outputs are rows of two classes, in spite of the model's `problem_type`.
    wrapper = OfMapping(InTwoColumns(multi_label_classifier))
    la = make(wrapper)
    la.fit(in_two_classes(batches))


def test_a_classifier_is_not_fitted_to_several_labels():
    model = lora_model("bert")
    model.config.problem_type = "single_label_classification"
    # As transformers says it, and as it is fitted without a word.
    la = make(model)
    la.fit(ragged_batches())
    with pytest.raises(ValueError, match=f"{MULTI_LABEL} does not fit"):
        make(model, likelihood="multi_label_classification")


@pytest.fixture(params=[torch.long, torch.float64])
def of_two_classes(request: pytest.FixtureRequest) -> list[Batch]:
    """Make texts of two classes, as indices or as numbers 0 and 1."""
    batches = ragged_batches(n_classes=2)
    for batch in batches:
        labels = batch["labels"]
        batch["labels"] = labels.to(request.param)
    return batches


def test_one_logit_of_two_classes_is_warned_of_once_after_a_fit(of_two_classes):
    model = lora_model("bert", n_labels=1)
    la = laplace_lora_ext.Laplace(model)
    assert la.likelihood == "regression"
    message = f"Every target is 0 or 1.*{MULTI_LABEL}"
    with pytest.warns(UserWarning, match=message) as caught:
        la.fit(of_two_classes)
    messages = [str(warning.message) for warning in caught]
    # Other warnings of a fit are none of this test's.
    ours = [text for text in messages if "Every target" in text]
    assert len(ours) == 1


def test_one_logit_is_no_classification(of_two_classes):
    model = lora_model("bert", n_labels=1)
    la = make(model)
    message = f"at least two outputs.*{MULTI_LABEL}"
    with pytest.raises(ValueError, match=message):
        la.fit(of_two_classes)


@ours_and_the_hosts
def test_numbers_are_not_taken_for_classes(structure):
    la = make(plain_model(2), structure, "regression")
    X = four_inputs()
    of_numbers = (X, real_targets())
    of_binary = (X, LABELS[:, :2])
    # One batch of 0 and 1 says nothing, as long as another has other numbers.
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Every target")
        la.fit([of_binary, of_numbers])
    with pytest.warns(UserWarning, match="Every target is 0 or 1"):
        la.fit([of_binary])
