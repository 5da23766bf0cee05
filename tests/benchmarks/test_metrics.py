"""Measures of class probabilities, and what tells foreign texts."""

import pytest
import torch
from torch.nn.functional import one_hot

from benchmarks.methods.mahalanobis import distances
from benchmarks.methods.members import with_temperature
from benchmarks.methods.priors import Prediction
from benchmarks.metrics import quality_with_aurc, shift_detection, signs_of

ROWS = [
    [0.9, 0.1],
    [0.6, 0.4],
    [0.3, 0.7],
]
P = torch.tensor(ROWS)


def test_risk_over_coverage_keeps_the_most_probable_texts_first():
    # The least probable text of the three is the one that is wrong.
    found = quality_with_aurc(P, torch.tensor([0, 0, 0]))
    assert found["aurc"] == pytest.approx((0 + 1 / 2 + 1 / 3) / 3)


def test_every_sign_detects_foreign_texts_by_itself_at_any_size():
    foreign = torch.tensor([[0.55, 0.45], [0.99, 0.01]])
    test = {**signs_of(P), "distance": torch.tensor([1.0, 2.0, 3.0])}
    shifted = {**signs_of(foreign), "distance": torch.tensor([1e6, 2e6])}
    figures = shift_detection(test, shifted)
    assert figures["auroc"]["distance"] == 1
    # One is more doubtful than all test texts, the other less.
    assert figures["auroc"]["entropy"] == figures["auroc"]["maximum"] == 0.5
    assert figures["shift_auroc"] == 0.5


def test_distances_are_from_the_nearest_class_under_what_both_share():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(2000) % 2
    means = torch.tensor([[5.0, 0.0], [-5.0, 0.0]]).double()
    # Other spreads of both axes tell this distance from the Euclidean one.
    spread = torch.tensor([1.0, 0.1], dtype=torch.float64)
    noise = torch.randn(2000, 2, generator=generator, dtype=torch.float64)
    training = means[labels] + spread * noise
    at_a_mean = [5.0, 0.0]
    three_spreads_off = [-5.0, 0.3]
    five_spreads_off = [0.0, 0.0]
    states = [at_a_mean, three_spreads_off, five_spreads_off]
    states = torch.tensor(states, dtype=torch.float64)
    squares = distances(training, labels, states)
    assert squares[0] < 0.1
    assert squares[1] == pytest.approx(9, rel=0.1)
    assert squares[2] == pytest.approx(25, rel=0.1)


def test_a_temperature_of_a_prediction_is_that_of_its_logits():
    logits = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.distributions.Categorical(logits=logits / 2).sample()
    sure = logits.softmax(-1)
    tempered = with_temperature(Prediction({"test": sure}), sure, labels)
    assert tempered.chosen is not None
    assert tempered.chosen > 1.5
    expected = (logits / tempered.chosen).softmax(-1)
    assert torch.allclose(tempered.probabilities["test"], expected, atol=1e-5)
    certain = Prediction({"test": one_hot(labels, 3).float()})
    of_certain = with_temperature(certain, sure, labels).probabilities["test"]
    assert torch.isfinite(of_certain).all()  # logarithms of 0 do no harm
