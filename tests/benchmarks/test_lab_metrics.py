"""Measures of class probabilities, and what tells foreign texts."""

import pytest
import torch

from benchmarks.metrics import (
    distances,
    quality_with_aurc,
    queue,
    shift_detection,
    signs_of,
)
from tests.support.models import generator

PROBABILITIES = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]])


def test_risk_over_coverage_keeps_the_most_probable_texts_first():
    # By probability the third text, which is wrong, comes between the others.
    found = quality_with_aurc(PROBABILITIES, torch.zeros(3).long())
    # Of one, two and three texts.
    assert found["aurc"] == pytest.approx((0 + 1 / 2 + 1 / 3) / 3)


def test_a_queue_keeps_what_it_promises_or_not():
    sureness = torch.tensor([0.99, 0.93, 0.8, 0.6], dtype=torch.float64)
    p = torch.stack([sureness, 1 - sureness], dim=1)
    found = queue(p, torch.tensor([0, 0, 0, 1]))
    # 0.99 and 0.93 promise 0.96, and all three no more than 0.907.
    assert found["share_at_promise"] == 0.5
    assert found["gap"] == pytest.approx(1 - 0.96)
    assert found["share_at_realised"] == 0.75
    none = queue(p[2:], torch.tensor([1, 1]))
    assert none == {"share_at_promise": 0, "gap": None, "share_at_realised": 0}


# --- what tells foreign texts ---------------------------------------------------------


def test_every_sign_detects_foreign_texts_by_itself_at_any_size():
    test = signs_of(PROBABILITIES) | {"distance": torch.tensor([1.0, 2.0, 3.0])}
    # One is more doubtful than all test texts, the other less.
    foreign = signs_of(torch.tensor([[0.55, 0.45], [0.99, 0.01]]))
    found = shift_detection(test, foreign | {"distance": torch.tensor([1e6, 2e6])})
    assert found["auroc"] == {"distance": 1, "entropy": 0.5, "maximum": 0.5}
    assert found["shift_auroc"] == 0.5


def test_a_distance_is_from_the_nearest_class_in_spreads_that_classes_share():
    n_texts = 2000
    labels = torch.arange(n_texts) % 2
    means = torch.tensor([[-5.0, 0.0], [5.0, 0.0]]).double()
    # Other spreads of both axes tell this distance from the Euclidean one.
    spread = torch.tensor([1.0, 0.1]).double()
    noise = torch.randn((n_texts, 2), generator=generator(0), dtype=torch.float64)
    training = means[labels] + spread * noise
    states = torch.tensor([[5.0, 0.0], [-5.0, 0.3], [0.0, 0.0]]).double()
    squares = distances(training, labels, states)
    # The shrunk covariance makes the narrow axis look broader, and 9 comes out as 8.6.
    assert squares.tolist() == pytest.approx([0, 3**2, 5**2], rel=0.1, abs=0.1)
