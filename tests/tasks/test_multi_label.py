"""Several labels an example, or one logit: independent Bernoullis."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import laplace_lora_ext
from laplace_lora_ext.metrics import compare
from laplace_lora_ext.plots import outcomes
from laplace_lora_ext.tasks import TASKS
from tests.support.dense import curvature_of, full_rank
from tests.support.labels import LABELS, InTwoColumns, in_two_classes, several_labels
from tests.support.models import (
    Batch,
    OfMapping,
    lora_model,
    pairs,
    plain_model,
    ragged_batches,
    real_targets,
    without_labels,
)
from tests.support.posteriors import generator, make

MULTI_LABEL = "multi_label_classification"
BERNOULLIS = TASKS[MULTI_LABEL]
# A label's sums and its two classes' differ by the order of additions.
SAME = {"rtol": 1e-10, "atol": 1e-10}
# What a search has minimised, near its optimum.
SAME_OBJECTIVE = {"rtol": 1e-5, "atol": 1e-8}
N_LABELS = 3
N_TEXTS = 8


def batches(n_labels: int = N_LABELS, **ragged: Any) -> list[Batch]:
    """Make ragged texts, whose labels are numbers 0 and 1."""
    found = ragged_batches(**ragged)
    for number, batch in enumerate(found):
        labels = several_labels(batch, n_labels)
        # Rolled, since each batch is given the same labels.
        batch["labels"] = labels.roll(number, 0)
    return found


def some_texts(n_labels: int = N_LABELS) -> Batch:
    """Make the inputs of three texts."""
    first, *_ = batches(n_labels)
    return without_labels(first)


def classifier(n_labels: int) -> nn.Module:
    model = lora_model("bert", n_labels=n_labels)
    return model.eval()


def empty(structure: str, model: nn.Module):
    """Make a posterior that is to be exact, and is not fitted yet."""
    settings = full_rank(structure, stochastic=False)
    return make(model, structure, MULTI_LABEL, **settings)


def fitted(
    structure: str = "lowrank_kron",
    n_labels: int = N_LABELS,
    model: nn.Module | None = None,
):
    if model is None:
        model = classifier(n_labels)
    la = empty(structure, model)
    la.fit(batches(n_labels))
    return la


def both(structure: str = "lowrank_kron", n_labels: int = N_LABELS):
    """Fit the labels' posterior, and a wrapper's with classes "not" and "yes"."""
    model = classifier(n_labels)
    la = fitted(structure, n_labels, model)
    wrapper = OfMapping(InTwoColumns(model))
    settings = full_rank(structure)
    wrapped = make(wrapper, structure, **settings)
    texts = batches(n_labels)
    with warnings.catch_warnings():
        # Nothing was trained: the weights are random.
        warnings.filterwarnings("ignore", "The trained model is no better")
        wrapped.fit(in_two_classes(texts))
    return la, wrapped


# --- as two classes -------------------------------------------------------------------


def test_decisions_are_those_of_two_classes():
    la, wrapped = both()
    texts = batches()
    as_classes = in_two_classes(texts)
    found = la.predict(texts, generator=generator())
    of_classes = wrapped.predict(as_classes, generator=generator())
    of_yes = of_classes.probabilities[:, 1]
    # Everything else is a number an example.
    expected = of_classes._replace(probabilities=of_yes)
    p = found.probabilities
    assert p.shape == (N_TEXTS, N_LABELS)
    # The wrapper's examples are the labels, text by text.
    as_examples = [column.flatten() for column in found]
    assert_close(as_examples, list(expected), **SAME)
    is_yes = p > 0.5
    assert torch.equal(found.labels, is_yes.long())


def test_figures_are_those_of_two_classes():
    la, wrapped = both()
    found = compare(la, batches())
    expected = compare(wrapped, in_two_classes(batches()))
    assert found.trained == pytest.approx(expected.trained, rel=1e-9)
    assert found.posterior == pytest.approx(expected.posterior, rel=1e-9)


def test_pictures_show_each_label_as_an_example_of_two_classes():
    drawn = outcomes(fitted(), batches())
    prediction = drawn.prediction
    n_examples = N_TEXTS * N_LABELS
    for p in (drawn.trained, prediction.probabilities):
        assert p.shape == (n_examples, 2)
    for labels in (drawn.labels, prediction.labels):
        assert labels.shape == (n_examples,)


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_drawn_weights_give_sigmoids(pred_type):
    la = fitted()
    X = some_texts()
    drawn = {"pred_type": pred_type, "n_samples": 5}
    logits = la.functional_samples(X, generator=generator(), **drawn)
    samples = la.predictive_samples(X, generator=generator(), **drawn)
    assert_close(samples, logits.sigmoid())
    if pred_type == "nn":
        # A prediction by drawn weights is the mean of what they predict.
        p = la(X, link_approx="mc", generator=generator(), **drawn)
        assert_close(p, samples.mean(0))


def test_one_logit_takes_labels_with_and_without_a_column():
    with_a_column = fitted(n_labels=1)
    texts = batches(n_labels=1)
    for batch in texts:
        # As transformers' collators make them.
        (label,) = batch["labels"].T
        batch["labels"] = label.long()
    model = classifier(n_labels=1)
    without = empty("lowrank_kron", model)
    without.fit(texts)
    assert_close(without.loss, with_a_column.loss, **SAME)
    found = curvature_of(without)
    expected = curvature_of(with_a_column)
    assert_close(found, expected, **SAME)


# --- choices of a prior ---------------------------------------------------------------


# How many times a label's objective is a text's: with the sum of its labels' losses.
@pytest.mark.parametrize(
    ("method", "loader", "factor"),
    [("agreement", "train_loader", 1), ("val_gd", "val_loader", N_LABELS)],
)
def test_a_prior_is_chosen_as_for_two_classes(method, loader, factor):
    objectives = []
    priors = []
    for la, data, n in zip(
        both(),
        (batches(), in_two_classes(batches())),
        (N_TEXTS, N_TEXTS * N_LABELS),
        strict=True,
    ):
        # All there is in one batch, so that no draw decides what is in it.
        options: dict[str, Any] = {}
        if method == "val_gd":
            options = {"n_steps": 3, "batch_size": n}
        history = la.optimize_prior_precision(
            method=method, **{loader: data}, **options
        )
        # Only the first, since Adam's steps are those of a loss of any scale.
        objectives.append(
            history.objective[:1] if method == "val_gd" else history.objective
        )
        priors.append(la.prior_precision)
    of_texts, of_labels = objectives
    assert_close(of_texts, factor * of_labels, **SAME_OBJECTIVE)
    # Near an optimum, rounding moves the place more than the height.
    assert_close(*priors, rtol=1e-3, atol=0)


# --- trainings ------------------------------------------------------------------------


def test_held_out_texts_have_each_label():
    y = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1], [0, 0, 0], [1, 1, 0]])
    # A group a label, the rarest that a text has; the last are texts without any.
    groups = BERNOULLIS.groups(y)
    assert groups.tolist() == [0, 1, 2, 3, 1]
    first_labels = y[:, 0]
    groups = BERNOULLIS.groups(first_labels)
    assert groups.tolist() == [0, 0, 0, 1, 0]


QUOTED = '"multi_label_classification"'  # as messages name it


def four_inputs() -> Tensor:
    (batch,) = pairs()
    X, _ = batch
    return X


# --- told of the likelihood, or refused -----------------------------------------------


@pytest.mark.parametrize(
    ("structure", "dtype"),
    [
        ("lowrank_kron", torch.long),
        ("lowrank_kron", torch.bool),
        ("kron", torch.float32),
    ],
)
def test_multi_hot_labels_are_told_of_their_likelihood(structure, dtype):
    y = LABELS.to(dtype)
    batch = (four_inputs(), y)
    la = make(plain_model(), structure)
    with pytest.raises(ValueError, match=f"batch 0: .*{QUOTED}"):
        la.fit([batch])


@pytest.fixture
def multi_label_classifier() -> nn.Module:
    model = lora_model("bert")
    model.config.problem_type = "multi_label_classification"
    return model


def test_a_classifier_tells_its_likelihood(multi_label_classifier):
    la = laplace_lora_ext.Laplace(multi_label_classifier)
    assert la.likelihood == "multi_label_classification"
    with pytest.raises(ValueError, match=QUOTED):
        laplace_lora_ext.Laplace(multi_label_classifier, "classification")
    model = lora_model("bert")
    model.config.problem_type = "single_label_classification"
    # As transformers says it, and as it is fitted without a word.
    make(model).fit(ragged_batches())
    with pytest.raises(ValueError, match=f"{QUOTED} does not fit"):
        make(model, likelihood="multi_label_classification")


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
    message = f"Every target is 0 or 1.*{QUOTED}"
    with pytest.warns(UserWarning, match=message) as caught:
        la.fit(of_two_classes)
    messages = [str(warning.message) for warning in caught]
    # Other warnings of a fit are none of this test's.
    ours = [text for text in messages if "Every target" in text]
    assert len(ours) == 1


def test_numbers_are_not_taken_for_classes():
    la = make(plain_model(2), likelihood="regression")
    X = four_inputs()
    of_numbers = (X, real_targets())
    of_binary = (X, LABELS[:, :2])
    # One batch of 0 and 1 says nothing, as long as another has other numbers.
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Every target")
        la.fit([of_binary, of_numbers])
    with pytest.warns(UserWarning, match="Every target is 0 or 1"):
        la.fit([of_binary])


# --- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (LABELS[:3], "(4, 3), 0 or 1 each, not (3, 3)"),
        (LABELS[:, 0], '"classification"'),
        (LABELS / 2, "from 0 to 0.5"),
        (-100 * LABELS, "from -100 to 0"),
        (LABELS.log(), "from -inf to 0"),
    ],
)
def test_labels_that_are_no_labels_are_refused(y, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        BERNOULLIS.check_targets(y, torch.randn(4, 3))


def test_sigmoids_in_place_of_logits_are_warned_of():
    logits = torch.randn(8, 3, generator=generator())
    y = torch.zeros(8, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BERNOULLIS.check_targets(y, logits)
    p = logits.sigmoid()
    with pytest.warns(UserWarning, match="leave the sigmoid"):
        BERNOULLIS.check_targets(y, p)
