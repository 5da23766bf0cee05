"""Measures of class probabilities, and what tells foreign texts."""

import pytest
import torch
from torch.distributions import Categorical
from torch.nn.functional import one_hot

from benchmarks.methods.mahalanobis import distances
from benchmarks.methods.members import with_temperature
from benchmarks.methods.priors import Prediction
from benchmarks.metrics import quality_with_aurc, shift_detection, signs_of
from tests.support.posteriors import generator

PROBABILITIES = torch.tensor(
    [
        [0.9, 0.1],
        [0.6, 0.4],
        [0.3, 0.7],
    ]
)


def test_risk_over_coverage_keeps_the_most_probable_texts_first():
    # By probability the third text, which is wrong, comes between the others.
    all_of_class_0 = torch.zeros(3).long()
    found = quality_with_aurc(PROBABILITIES, all_of_class_0)
    # Of one, two and three texts.
    risks = [0, 1 / 2, 1 / 3]
    assert found["aurc"] == pytest.approx(sum(risks) / 3)


# --- what tells foreign texts ---------------------------------------------------------


@pytest.fixture
def figures():
    """How well two foreign texts are told from three test texts."""
    test = signs_of(PROBABILITIES)
    test["distance"] = torch.tensor([1.0, 2.0, 3.0])
    # One is more doubtful than all test texts, the other less.
    doubtful = [0.55, 0.45]
    sure = [0.99, 0.01]
    foreign = signs_of(torch.tensor([doubtful, sure]))
    foreign["distance"] = torch.tensor([1e6, 2e6])
    return shift_detection(test, foreign)


@pytest.mark.parametrize(
    ("sign", "auroc"),
    [
        ("distance", 1),
        ("entropy", 0.5),
        ("maximum", 0.5),
    ],
)
def test_every_sign_detects_foreign_texts_by_itself_at_any_size(sign, auroc, figures):
    assert figures["auroc"][sign] == auroc


def test_a_shift_is_told_by_entropies(figures):
    assert figures["shift_auroc"] == 0.5


@pytest.fixture
def distances_to_two_classes():
    """Squared distances of states, from texts of two classes."""
    n_texts = 2000
    labels = torch.arange(n_texts) % 2
    left = [-5.0, 0.0]
    right = [5.0, 0.0]
    means = torch.tensor([left, right]).double()
    # Other spreads of both axes tell this distance from the Euclidean one.
    spread = torch.tensor([1.0, 0.1]).double()
    noise = torch.randn(
        (n_texts, 2),
        generator=generator(0),
        dtype=torch.float64,
    )
    training = means[labels] + spread * noise

    def distances_of(state):
        states = torch.tensor([state]).double()
        (square,) = distances(training, labels, states)
        return square.item()

    return distances_of


def test_a_distance_is_from_the_nearest_class(distances_to_two_classes):
    at_a_mean = [5.0, 0.0]
    square = distances_to_two_classes(at_a_mean)
    assert square < 0.1


@pytest.mark.parametrize(
    ("state", "n_spreads"),
    [
        ([-5.0, 0.3], 3),
        ([0.0, 0.0], 5),
    ],
)
def test_a_distance_is_in_spreads_that_both_classes_share(
    state,
    n_spreads,
    distances_to_two_classes,
):
    square = distances_to_two_classes(state)
    # The shrunk covariance makes the narrow axis look broader, and 9 comes out as 8.6.
    assert square == pytest.approx(n_spreads**2, rel=0.1)


# --- temperatures ---------------------------------------------------------------------


@pytest.fixture
def sure():
    """Logits that are twice those that labels are drawn by, and these labels."""
    torch.manual_seed(0)
    logits = torch.randn(400, 3)
    labels = Categorical(logits=logits / 2).sample()
    return logits, labels


def test_a_temperature_of_a_prediction_is_that_of_its_logits(sure):
    logits, labels = sure
    p = logits.softmax(-1)
    prediction = Prediction({"test": p})
    tempered = with_temperature(prediction, p, labels)
    temperature = tempered.chosen
    assert temperature is not None
    assert temperature > 1.5
    found = tempered.probabilities["test"]
    expected = (logits / temperature).softmax(-1)
    assert torch.allclose(found, expected, atol=1e-5)


def test_logarithms_of_no_probability_do_a_temperature_no_harm(sure):
    logits, labels = sure
    certain = one_hot(labels, 3).float()
    prediction = Prediction({"test": certain})
    tempered = with_temperature(
        prediction,
        logits.softmax(-1),
        labels,
    )
    found = tempered.probabilities["test"]
    assert torch.isfinite(found).all()
