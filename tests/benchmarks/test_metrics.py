"""Measures of class probabilities, and what tells foreign texts."""

import pytest
import torch
from torch.distributions import Categorical
from torch.nn.functional import one_hot

from benchmarks.methods.mahalanobis import distances
from benchmarks.methods.members import with_temperature
from benchmarks.methods.priors import Prediction
from benchmarks.metrics import quality_with_aurc, shift_detection, signs_of

PROBABILITIES = torch.tensor(
    [
        [0.9, 0.1],
        [0.6, 0.4],
        [0.3, 0.7],
    ]
)


def test_risk_over_coverage_keeps_the_most_probable_texts_first():
    # By probability the third text, which is wrong, comes between the others.
    found = quality_with_aurc(PROBABILITIES, torch.tensor([0, 0, 0]))
    assert found["aurc"] == pytest.approx((0 + 1 / 2 + 1 / 3) / 3)


def test_every_sign_detects_foreign_texts_by_itself_at_any_size():
    test = signs_of(PROBABILITIES)
    test["distance"] = torch.tensor([1.0, 2.0, 3.0])
    foreign = signs_of(torch.tensor([[0.55, 0.45], [0.99, 0.01]]))
    foreign["distance"] = torch.tensor([1e6, 2e6])
    figures = shift_detection(test, foreign)
    assert figures["auroc"]["distance"] == 1
    # One is more doubtful than all test texts, the other less.
    assert figures["auroc"]["entropy"] == 0.5
    assert figures["auroc"]["maximum"] == 0.5
    assert figures["shift_auroc"] == 0.5


def test_distances_are_from_the_nearest_class_under_what_both_share():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(2000) % 2
    means = torch.tensor([[5.0, 0.0], [-5.0, 0.0]]).double()
    # Other spreads of both axes tell this distance from the Euclidean one.
    spread = torch.tensor([1.0, 0.1]).double()
    noise = torch.randn(2000, 2, generator=generator, dtype=torch.float64)
    training = means[labels] + spread * noise
    at_a_mean = [5.0, 0.0]
    three_spreads_off = [-5.0, 0.3]
    five_spreads_off = [0.0, 0.0]
    states = torch.tensor([at_a_mean, three_spreads_off, five_spreads_off]).double()
    squares = distances(training, labels, states)
    # The shrunk covariance makes the narrow axis look broader, and 9 comes out as 8.6.
    assert squares[0] < 0.1
    assert squares[1] == pytest.approx(9, rel=0.1)
    assert squares[2] == pytest.approx(25, rel=0.1)


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
    tempered = with_temperature(Prediction({"test": p}), p, labels)
    assert tempered.chosen is not None
    assert tempered.chosen > 1.5
    expected = (logits / tempered.chosen).softmax(-1)
    assert torch.allclose(tempered.probabilities["test"], expected, atol=1e-5)


def test_logarithms_of_no_probability_do_a_temperature_no_harm(sure):
    logits, labels = sure
    certain = Prediction({"test": one_hot(labels, 3).float()})
    tempered = with_temperature(certain, logits.softmax(-1), labels)
    assert torch.isfinite(tempered.probabilities["test"]).all()
