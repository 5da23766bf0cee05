"""Labels of tokens: a text is one of the data, its labels examples."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext import plots
from laplace_lora_ext.passes import recorder
from tests.support.dense import EXACT, full_rank
from tests.support.models import (
    N_CLASSES,
    Batch,
    lora_model,
    part_of,
    record_calls,
    without_labels,
)
from tests.support.posteriors import generator, make
from tests.support.tasks import IGNORED, is_real, token_classifier
from tests.support.tasks import labelled_batches as batches

TOKENS = "token_classification"
# A prior precision that leaves weights a standard deviation of 1e-7.
NARROW = 1e14
# Of predictions, which are NaN at padding.
EXACT_OR_NAN = EXACT | {"equal_nan": True}


def first_batch() -> Batch:
    first, *_ = batches()
    return first


def fitted(structure: str = "lowrank_kron", data: Any = None, **keywords: Any):
    """Fit a posterior at full rank and by exact seeds."""
    settings = full_rank(structure, stochastic=False) | keywords
    la = make(token_classifier(), structure, TOKENS, **settings)
    la.fit(batches() if data is None else data)
    return la


@pytest.fixture
def la():
    return fitted()


def predicted(la, data: Batch | Sequence[Batch]):
    """Predict by draws of one seed, so that calls can be compared."""
    return la.predict(data, generator=generator())


def test_pictures_of_labels_of_tokens_are_refused(la):
    with pytest.raises(ValueError, match="token_classification has one a token"):
        plots.outcomes(la, batches())


def test_a_prediction_has_numbers_of_every_token_but_padding_at_one_width(la):
    first, second, _ = batches()
    mask = is_real(first)
    prediction = predicted(la, first)
    p = prediction.probabilities
    assert p.shape == (*mask.shape, N_CLASSES)
    assert p[~mask].isnan().all()
    sums = p[mask].sum(-1)
    assert_close(sums, torch.ones_like(sums), **EXACT)
    # Which tokens are labelled is nothing that a prediction may depend on.
    unlabelled = without_labels(first)
    assert_close(la(unlabelled, link_approx="mean_field"), p, **EXACT_OR_NAN)
    # All but the probabilities have a number a token.
    _, *by_token = prediction
    assert all(column.shape == mask.shape for column in by_token)
    most_probable = p.argmax(-1)
    assert torch.equal(prediction.labels, most_probable.where(mask, IGNORED))
    information = prediction.epistemic_entropy
    assert (information[mask] > 0).all()
    assert information[~mask].isnan().all()

    # Its first text is of four tokens.
    narrow = {key: value[:1, :5] for key, value in second.items()}
    found = predicted(la, [narrow, first])
    assert found.labels.shape == (4, 7)
    assert (found.labels[0, 5:] == IGNORED).all()
    assert_close(found.probabilities[1:], p, **EXACT_OR_NAN)


# --- predictions at a cost of their own -----------------------------------------------


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_samples_are_of_every_token_but_padding(la, pred_type):
    batch = first_batch()
    # Each sample is then the model's own logits.
    la.prior_precision = NARROW
    mask = is_real(batch)
    f = la.model.model(**without_labels(batch)).logits.where(mask[..., None], torch.nan)
    close = {"rtol": 0, "atol": 1e-5, "equal_nan": True}
    (logits,) = la.functional_samples(batch, pred_type, n_samples=1)
    (p,) = la.predictive_samples(batch, pred_type, n_samples=1)
    assert_close(logits, f, **close)
    assert_close(p, f.softmax(-1), **close)
    assert_close(la.function(0, pred_type)(batch), f, **close)


@pytest.mark.parametrize("structure", ["lowrank_kron", "full"])
def test_a_long_text_is_read_alike_by_a_few_tokens_at_a_time(structure, monkeypatch):
    la = fitted(structure=structure)
    long_text = part_of(first_batch(), slice(1))
    # More than are read at once below.
    assert (long_text["labels"] != IGNORED).sum() > 2

    def everything() -> list[Any]:
        """Predict in every way, and tell what is kept of labelled tokens."""
        found = [
            la(long_text),
            tuple(la.predictive_moments(long_text)),
            la.function(3)(long_text),
            predicted(la, long_text),
        ]
        if structure == "lowrank_kron":
            # By default in float32, which is less exact.
            kept = la.predictive_statistics([long_text], dtype=torch.float64)
            found += [kept.moments(2.0).f_var, kept.targets]
        return found

    # At once, before there is room for two tokens' Jacobians only.
    expected = everything()
    monkeypatch.setattr(recorder, "_NUMBERS", 2 * N_CLASSES * la.n_params)
    assert_close(everything(), expected, **EXACT_OR_NAN)
    calls = record_calls(la.model.model)
    la(long_text)
    # The last of seven tokens has a pass for itself.
    assert len(calls) == math.ceil(7 / 2)
    # Without a mask, all tokens are real.
    unmasked = {"input_ids": long_text["input_ids"]}
    assert_close(la(unmasked), expected[0], **EXACT_OR_NAN)
    # Of several texts, each by itself; once they are compared with all at once.
    calls.clear()
    of_first, *_ = la(first_batch())
    assert len(calls) == 4 + 2 + 3 + 1
    (of_text,) = expected[0]
    assert_close(of_first, of_text, **EXACT_OR_NAN)


def test_texts_that_come_one_at_a_time_may_lack_labels(la, monkeypatch):
    _, batch, _ = batches()
    labelled = batch["labels"] != IGNORED
    _, of_second, *_ = labelled
    assert not of_second.any()
    expected = la.predictive_statistics([batch], dtype=torch.float64)
    # Not even one text's rows may be in a pass together.
    monkeypatch.setattr(recorder, "_ON_CPU", 1)
    found = la.predictive_statistics([batch], dtype=torch.float64)
    assert_close(found.columns, expected.columns, **EXACT)
    p = la(batch, fitting=True)
    assert len(p) == labelled.sum()


# --- bad input ------------------------------------------------------------------------


def test_labels_of_padding_are_refused():
    batch = first_batch()
    batch["labels"].fill_(0)
    with pytest.raises(ValueError, match="attention_mask is 0"):
        fitted(data=[batch])


def test_a_batch_without_a_label_is_refused(la):
    first, second, _ = batches()
    second["labels"].fill_(IGNORED)
    for use in (
        lambda: la.fit([first, second]),
        lambda: la.predictive_statistics([first, second]),
    ):
        with pytest.raises(ValueError, match=r"batch 1: no token is labelled"):
            use()


def fit_labels(change: Callable[[Tensor], Tensor]) -> None:
    batch = first_batch()
    fitted(data=[batch | {"labels": change(batch["labels"])}])


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (partial(fit_labels, lambda y: y[:, 0]), '"classification"'),
        (partial(fit_labels, Tensor.float), "whole numbers"),
        (partial(fit_labels, Tensor.bool), "whole numbers"),
        (
            lambda: make(lora_model("bert"), likelihood=TOKENS).fit(batches()),
            "logits of shape",
        ),
        (lambda: make(token_classifier()).fit(batches()), TOKENS),
        (lambda: make(token_classifier(), "kron", TOKENS), "hessian_structure"),
        (lambda: fitted(class_token_ids=[1, 2]), "leave out class_token_ids"),
    ],
)
def test_another_likelihoods_data_or_models_are_told_which_it_is(attempt, message):
    with pytest.raises(ValueError, match=message):
        attempt()
